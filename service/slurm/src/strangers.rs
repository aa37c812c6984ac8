//! Tenants of `slurm.toml` that the policy does not name: an operator may have mistyped them, and no cap or share would hold for their jobs.

use std::path::Path;

use anyhow::Context as _;
use mccs_config::error::in_words;
use mccs_config::{PolicyFile, SlurmFile};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest};

/// Prints a warning for each. Without a policy to compare with, says so: a host may have no controller, and no service yet.
///
/// # Errors
/// The policy that the operator has named cannot be read.
pub fn warn(file: &SlurmFile, named: Option<&Path>) -> anyhow::Result<()> {
    let policy = match named {
        Some(path) => Ok(PolicyFile::load(path)?),
        None => in_force(file),
    };
    match policy {
        Ok(policy) => file.strangers(&policy).iter().for_each(|stranger| eprintln!("mccs-slurm: warning: {stranger}")),
        Err(error) => {
            eprintln!(
                "mccs-slurm: its tenants are compared with no policy: {}; --policy names one",
                in_words(error.as_ref())
            );
        }
    }
    Ok(())
}

/// The policy in force, as this host's service knows.
fn in_force(file: &SlurmFile) -> anyhow::Result<PolicyFile> {
    let request = ControlRequest::Controller { request: ControllerRequest::Show };
    let text = match call(&file.control_socket(), &request)? {
        ControlAnswer::Controller(answer) => match *answer {
            ControllerAnswer::Show(view) => view.policy_text.context("no policy file is in force")?,
            answer => anyhow::bail!("the service answers something else: {answer:?}"),
        },
        ControlAnswer::Refused(reason) => anyhow::bail!(reason),
        answer => anyhow::bail!("the service answers something else: {answer:?}"),
    };
    Ok(PolicyFile::parse(&text, "the policy in force")?)
}
