//! Messages of `mccsctl` without a service.

use std::process::{Command, Output};

/// The program, whatever socket the environment names.
fn mccsctl() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mccsctl"));
    command.env_remove("MCCS_CONTROL_SOCKET");
    command
}

fn complaint(output: &Output) -> String {
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn shells_complete_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = mccsctl().args(["completions", shell]).output().expect("runs");
        let text = String::from_utf8(output.stdout).expect("text");
        assert!(output.status.success() && text.contains("why-stuck") && text.contains("rollback"), "{shell}: {text}");
    }
}

#[test]
fn mistakes_at_the_prompt_are_told() {
    let nobody = mccsctl().args(["--socket", "/nowhere/control.sock", "show"]).output().expect("runs");
    assert!(complaint(&nobody).contains("/nowhere/control.sock"), "{nobody:?}");
    for wrong in [&["reconfigure", "1", "--large-from", "much"][..], &["watch", "--interval", "0"], &["why-stuck", "x"]]
    {
        let output = mccsctl().args(wrong).output().expect("runs");
        assert!(!complaint(&output).is_empty(), "{wrong:?}");
    }
}
