//! Removes a fabric: its processes, its namespaces (and with them their links), its file. Doing it
//! twice is no error.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::error::{FabricError, Result};
use super::plan::Tool;
use super::topology::namespace;
use super::{execute, netns, state};

/// How often processes are looked for until none is left; a killed process may take a while to be gone.
const ROUNDS: u32 = 200;
const BETWEEN_ROUNDS: Duration = Duration::from_millis(10);

/// Removes whatever there is of the fabric `name`; says whether there was anything.
///
/// # Errors
/// Something cannot be removed.
pub fn remove(name: &str) -> Result<bool> {
    let namespaces = netns::names(&namespace(name, ""))?;
    kill_inside(name, &namespaces)?;
    if !namespaces.is_empty() {
        let lines: String = namespaces.iter().map(|namespace| format!("netns delete {namespace}\n")).collect();
        let output = execute::run(Tool::Ip, &["-force"], &lines)?;
        let left = netns::names(&namespace(name, ""))?;
        if !left.is_empty() {
            let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            return Err(FabricError::Left { name: name.to_owned(), what: format!("{}: {said}", left.join(", ")) });
        }
    }
    Ok(state::forget(name)? || !namespaces.is_empty())
}

/// Kills what runs in the namespaces: a process there would keep its namespace, and its links, alive without a name.
fn kill_inside(name: &str, namespaces: &[String]) -> Result<()> {
    let identities: Vec<_> = namespaces.iter().filter_map(|name| netns::identity(&netns::path(name))).collect();
    for round in 0.. {
        let inside = processes_inside(&identities)?;
        if inside.is_empty() {
            break;
        }
        if round == ROUNDS {
            let what = format!("processes {inside:?} in its namespaces do not end");
            return Err(FabricError::Left { name: name.to_owned(), what });
        }
        for pid in inside {
            // One that has ended meanwhile is what is wanted.
            let _ = kill(pid, Signal::SIGKILL);
        }
        std::thread::sleep(BETWEEN_ROUNDS);
    }
    Ok(())
}

fn processes_inside(identities: &[(u64, u64)]) -> Result<Vec<Pid>> {
    let folder = Path::new("/proc");
    let entries = folder.read_dir().map_err(|source| FabricError::State { path: folder.into(), source })?;
    let inside = |pid: &Pid| {
        // A zombie has no namespace, so it is never counted.
        let namespace = netns::identity(&folder.join(pid.to_string()).join("ns/net"));
        *pid != Pid::this() && namespace.is_some_and(|namespace| identities.contains(&namespace))
    };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    Ok(pids.filter(inside).collect())
}
