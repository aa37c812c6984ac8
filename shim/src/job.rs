//! Job name from the environment (`MCCS_JOB`, Slurm, PBS, LSF), which operators see beside
//! communicators.

use mccs_ipc::protocol::JoinOptions;

/// Variables with a job's number, and with its name, of launchers that have both.
const LAUNCHERS: [(&str, &str); 3] =
    [("SLURM_JOB_ID", "SLURM_JOB_NAME"), ("PBS_JOBID", "PBS_JOBNAME"), ("LSB_JOBID", "LSB_JOBNAME")];

/// Name that operators are shown beside communicators: `MCCS_JOB`, or else a launcher's number and name; empty where there is
/// none.
pub(crate) fn of_environment() -> String {
    of(|name| std::env::var(name).ok())
}

fn of(variable: impl Fn(&str) -> Option<String>) -> String {
    let known = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
    let of_launcher = || {
        LAUNCHERS.iter().find_map(|(number, name)| {
            let number = known(number)?;
            Some(known(name).map_or_else(|| number.clone(), |name| format!("{number} {name}")))
        })
    };
    known("MCCS_JOB").or_else(of_launcher).map_or_else(String::new, |job| JoinOptions::name_of(&job))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_what_its_launcher_calls_it() {
        let job = |all: &[(&str, &str)]| {
            of(|name| all.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(job(&[]), "");
        assert_eq!(job(&[("SLURM_JOB_NAME", "train")]), "", "a name alone may be left over");
        assert_eq!(job(&[("SLURM_JOB_ID", "4711"), ("SLURM_JOB_NAME", "train")]), "4711 train");
        assert_eq!(job(&[("PBS_JOBID", "12.head")]), "12.head");
        assert_eq!(job(&[("SLURM_JOB_ID", "4711"), ("MCCS_JOB", "mine")]), "mine");
        assert_eq!(job(&[("MCCS_JOB", " ")]), "");
        let long = job(&[("MCCS_JOB", &format!("two\nlines {}", "x".repeat(100)))]);
        assert!(long.starts_with("two lines x") && long.len() == 64, "{long}");
    }
}
