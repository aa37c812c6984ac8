//! Timetable of a run: which job or view is due, what is late, and when all is over.

use std::time::Instant;

use anyhow::Result;

use super::{Process, Run};
use crate::spec::Role;

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Running { since: Instant },
    Ended { at: Instant },
}

impl Run<'_> {
    /// Starts jobs and views at their times, then the views of the end, until all have ended or one has failed.
    pub(super) fn run_jobs(&mut self, ready_at: Instant) -> Result<()> {
        let plan = self.plan;
        let over = ready_at + plan.timeout;
        let mut stages = vec![Stage::Waiting; plan.jobs.len()];
        let mut viewed = vec![false; plan.views.len()];
        while self.cause.is_none() {
            let now = Instant::now();
            if now >= over {
                self.fail_late("the run", plan.timeout);
                break;
            }
            let mut deadlines = vec![over];
            for job in 0..plan.jobs.len() {
                deadlines.extend(self.step(job, &mut stages, ready_at, now)?);
            }
            for (view, viewed) in plan.views.iter().zip(&mut viewed) {
                let Some(due) = view.after.map(|after| ready_at + after).filter(|_| !*viewed) else { continue };
                if now < due {
                    deadlines.push(due);
                    continue;
                }
                *viewed = true;
                view.processes.iter().try_for_each(|process| self.start(process))?;
            }
            let all_ended = stages.iter().all(|stage| matches!(stage, Stage::Ended { .. }));
            if self.cause.is_some() || (all_ended && !self.anyone_runs()) {
                break;
            }
            self.wait(deadlines.into_iter().min())?;
        }
        for (view, _) in plan.views.iter().zip(viewed).filter(|(_, viewed)| !viewed) {
            // One host after the other, so that their tables stay whole.
            for process in &view.processes {
                if self.cause.is_none() {
                    self.start(process)?;
                    self.wait_for_all_but_services(over)?;
                }
            }
        }
        Ok(())
    }

    /// Brings a job as far as it can be; says when it must be looked at again.
    fn step(&mut self, index: usize, stages: &mut [Stage], ready_at: Instant, now: Instant) -> Result<Option<Instant>> {
        let job = &self.plan.jobs[index];
        match stages[index] {
            Stage::Waiting => {
                let from = match job.after.map(|after| stages[after]) {
                    None => ready_at,
                    Some(Stage::Ended { at }) => at,
                    Some(_) => return Ok(None),
                };
                let due = from + job.start;
                if now < due {
                    return Ok(Some(due));
                }
                job.ranks.iter().try_for_each(|rank| self.start(rank))?;
                stages[index] = Stage::Running { since: now };
                Ok(job.timeout.map(|timeout| now + timeout))
            }
            Stage::Running { .. } if !self.is_running(&job.name) => {
                stages[index] = Stage::Ended { at: now };
                // Another may follow it, further down in this round or at once in the next.
                Ok(Some(now))
            }
            Stage::Running { since } => {
                let due = job.timeout.map(|timeout| since + timeout);
                if let (Some(timeout), true) = (job.timeout, due.is_some_and(|due| now >= due)) {
                    self.fail_late(&format!("job {}", job.name), timeout);
                }
                Ok(due)
            }
            Stage::Ended { .. } => Ok(None),
        }
    }

    fn wait_for_all_but_services(&mut self, over: Instant) -> Result<()> {
        while self.cause.is_none() && self.anyone_runs() {
            if Instant::now() >= over {
                self.fail_late("the run", self.plan.timeout);
                break;
            }
            self.wait(Some(over))?;
        }
        Ok(())
    }

    fn is_running(&self, name: &str) -> bool {
        let of_job = |process: &Process<'_>| matches!(&process.spec.role, Role::Rank { job, .. } if job == name);
        self.processes.iter().any(|process| process.runs() && of_job(process))
    }

    fn anyone_runs(&self) -> bool {
        self.processes.iter().any(|process| process.runs() && process.spec.role != Role::Service)
    }
}
