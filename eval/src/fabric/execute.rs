//! Executes a plan's commands (`ip`, `tc`), one process a batch, and explains failures. It names
//! the command and the part of the kernel that it needs.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use super::error::{FabricError, Result};
use super::netns;
use super::plan::{self, Setting, Step, Tool};

/// Refuses a machine that cannot hold a fabric at all.
///
/// # Errors
/// Not root, no namespaces in the kernel, or a tool is missing.
pub fn require_host() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Err(FabricError::NotRoot);
    }
    if netns::identity("/proc/self/ns/net".as_ref()).is_none() {
        return Err(FabricError::NoNamespaces);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    for tool in [Tool::Ip, Tool::Tc] {
        if !std::env::split_paths(&path).any(|folder| folder.join(tool.program()).is_file()) {
            return Err(FabricError::NoTool { program: tool.program() });
        }
    }
    Ok(())
}

/// Carries out one step.
///
/// # Errors
/// The first command or setting that is refused; those after it are not tried.
pub fn step(step: &Step) -> Result<()> {
    match step {
        Step::Batch { tool, namespace, commands } => batch(*tool, namespace.as_deref(), commands),
        Step::Settings { namespace, settings } => {
            netns::within(namespace, || settings.iter().try_for_each(|setting| set(namespace, setting)))
        }
    }
}

fn set(namespace: &str, setting: &Setting) -> Result<()> {
    // `/proc/sys/net` shows the namespace of the thread that opens it.
    let written = std::fs::write(format!("/proc/sys/{}", setting.key), &setting.value);
    match (written, setting.needs) {
        (Err(source), Some(needs)) => {
            Err(FabricError::Setting { namespace: namespace.to_owned(), key: setting.key, needs, source })
        }
        _ => Ok(()),
    }
}

fn batch(tool: Tool, namespace: Option<&str>, commands: &[plan::Command]) -> Result<()> {
    let mut arguments = Vec::new();
    if let Some(namespace) = namespace {
        arguments.extend(["-n", namespace]);
    }
    let lines: String = commands.iter().map(|command| format!("{}\n", command.text)).collect();
    let output = run(tool, &arguments, &lines)?;
    if output.status.success() { Ok(()) } else { Err(explain(tool, namespace, commands, &output.stderr)) }
}

/// Runs a tool on `lines`, each a command.
///
/// # Errors
/// It cannot be run.
pub fn run(tool: Tool, arguments: &[&str], lines: &str) -> Result<Output> {
    let failed = |source| FabricError::Tool { program: tool.program(), source };
    let mut child = Command::new(tool.program())
        .args(arguments)
        .args(["-batch", "-"])
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        // A tool that stopped early says why by itself.
        let _ = input.write_all(lines.as_bytes());
    }
    child.wait_with_output().map_err(failed)
}

/// Finds the command that failed by the line number that the tool ends with: `Command failed -:3`.
fn explain(tool: Tool, namespace: Option<&str>, commands: &[plan::Command], stderr: &[u8]) -> FabricError {
    let text = String::from_utf8_lossy(stderr);
    let (notes, said): (Vec<&str>, Vec<&str>) =
        text.lines().filter(|line| !line.trim().is_empty()).partition(|line| line.starts_with("Command failed"));
    let line = notes.last().and_then(|note| note.rsplit(':').next()?.trim().parse::<usize>().ok());
    let failed = line.and_then(|line| commands.get(line.checked_sub(1)?)).or(commands.first());
    let at = namespace.map(|name| format!("-n {name} ")).unwrap_or_default();
    let text = failed.map_or("-batch", |command| &command.text);
    FabricError::Command {
        command: format!("{} {at}{text}", tool.program()),
        said: if said.is_empty() { "no reason given".to_owned() } else { said.join("; ") },
        needs: failed.map_or(plan::Piece::Routing, |command| command.needs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::plan::Piece;

    #[test]
    fn a_failed_line_names_its_command_and_what_it_needs() {
        let commands = [("qdisc a", Piece::Htb), ("class b", Piece::Htb), ("qdisc c", Piece::Fifo)]
            .map(|(text, needs)| plan::Command { text: text.to_owned(), needs });
        let text = |stderr: &str| explain(Tool::Tc, Some("mccs-x-h0"), &commands, stderr.as_bytes()).to_string();
        let unknown = text("Error: Specified qdisc kind is unknown.\nCommand failed -:3\n");
        assert_eq!(
            unknown,
            "`tc -n mccs-x-h0 qdisc c` failed: Error: Specified qdisc kind is unknown.; it needs byte-limited FIFO \
             queues (CONFIG_NET_SCHED)"
        );
        assert!(
            text("RTNETLINK answers: Operation not permitted\nCommand failed -:1\n").contains("CONFIG_NET_SCH_HTB")
        );
        assert!(text("").contains("no reason given"));
        assert!(text("Command failed -:99\n").contains("qdisc a"));
    }
}
