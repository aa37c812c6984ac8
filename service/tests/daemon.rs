//! The service as a program that a service manager starts and ends.

#[allow(dead_code, reason = "the other tests of programs need more of it")]
mod programs;

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::programs::{mccsctl, watchdog};

#[test]
fn a_service_manager_hears_when_it_is_ready_and_when_it_ends() {
    watchdog();
    let folder = tempfile::tempdir().expect("a directory");
    let (config, manager) = (folder.path().join("service.toml"), folder.path().join("manager"));
    let runtime_dir = folder.path();
    std::fs::write(&config, format!("[service]\nruntime_dir = {runtime_dir:?}\n[cuda]\nuse = \"off\"\n"))
        .expect("a file");
    let socket = UnixDatagram::bind(&manager).expect("a socket");
    let mut service = Command::new(env!("CARGO_BIN_EXE_mccs-service"));
    service.arg("--config").arg(&config).env("NOTIFY_SOCKET", &manager).stdout(Stdio::null());
    let mut service = service.spawn().expect("starts");
    let hears = || {
        let mut text = [0; 64];
        let bytes = socket.recv(&mut text).expect("a word");
        String::from_utf8_lossy(&text[..bytes]).trim_end().to_owned()
    };
    assert_eq!(hears(), "READY=1");
    let asked = mccsctl().arg("--socket").arg(folder.path().join("mccs-control.sock")).arg("sessions").output();
    assert!(asked.expect("runs").status.success());
    kill(Pid::from_raw(service.id() as i32), Signal::SIGTERM).expect("a process");
    assert_eq!(hears(), "STOPPING=1");
    assert!(service.wait().expect("a child").success());
}
