//! Output of a dry run: the plan in the order in which it is carried out.

use std::fmt;
use std::path::Path;

use mccs_config::DurationText;

use super::{HostSpec, JobSpec, Plan, ProcessSpec, ViewSpec};
use crate::reach::quoted;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "output   {}", self.output_dir.display())?;
        writeln!(
            f,
            "timeout  {}, and {} from asking to killing",
            DurationText(self.timeout),
            DurationText(self.grace)
        )?;
        self.hosts.iter().try_for_each(|host| host.fmt(f))?;
        for host in &self.hosts {
            if let Some(service) = &host.service {
                writeln!(f, "\n# service.toml of {}, kept in {}", host.name, service.config_copy.display())?;
                writeln!(f, "{}", service.config.trim_end())?;
            }
        }
        if self.hosts.iter().any(|host| host.service.is_some()) {
            writeln!(f, "\n# services, ready within {}", DurationText(self.ready_timeout))?;
            self.hosts
                .iter()
                .filter_map(|host| host.service.as_ref())
                .try_for_each(|service| service.process.fmt(f))?;
        }
        self.jobs.iter().try_for_each(|job| self.show_job(job, f))?;
        self.views.iter().try_for_each(|view| view.fmt(f))
    }
}

impl Plan {
    fn show_job(&self, job: &JobSpec, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n# job {} at {}", job.name, DurationText(job.start))?;
        if let Some(after) = job.after {
            write!(f, " after the end of {}", self.jobs[after].name)?;
        }
        if let Some(timeout) = job.timeout {
            write!(f, ", within {}", DurationText(timeout))?;
        }
        writeln!(f)?;
        job.ranks.iter().try_for_each(|rank| write!(f, "{rank}"))
    }
}

impl fmt::Display for HostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.command.iter().map(|word| quoted(word)).collect();
        writeln!(f, "\n# host {}", self.name)?;
        writeln!(f, "agent    {}", words.join(" "))?;
        writeln!(f, "sockets  {}", self.runtime_dir.display())
    }
}

impl fmt::Display for ViewSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.after {
            Some(after) => writeln!(f, "\n# view at {}", DurationText(after))?,
            None => writeln!(f, "\n# view at the end")?,
        }
        self.processes.iter().try_for_each(|process| process.fmt(f))
    }
}

impl fmt::Display for ProcessSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &Path| quoted(&path.display().to_string());
        write!(f, "[{}]", self.label)?;
        if let Some(dir) = &self.working_dir {
            write!(f, " cd {};", path(dir))?;
        }
        for (name, value) in &self.env {
            let value = if value.is_empty() { String::new() } else { quoted(value) };
            write!(f, " {name}={value}")?;
        }
        write!(f, " {}", path(&self.program))?;
        if self.found == Some(false) {
            f.write_str(" (not found)")?;
        }
        for argument in &self.arguments {
            write!(f, " {}", quoted(argument))?;
        }
        writeln!(f, " > {}", path(&self.log))
    }
}
