//! A console as a process, and requests to it, byte by byte.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// A console. Ends with the value.
pub struct Console {
    child: Child,
    pub address: SocketAddr,
    _folder: tempfile::TempDir,
}

/// An answer of the console.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// By names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error's word for programs.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_else(|| panic!("{self:?}")).to_owned()
    }
}

impl Console {
    /// Starts a console for the service that listens on `socket`.
    pub fn start(socket: &Path) -> Self {
        Self::start_as(socket, None)
    }

    /// The same, as another user.
    pub fn start_as(socket: &Path, uid: Option<u32>) -> Self {
        mccs_tests::watchdog();
        let folder = tempfile::tempdir().expect("a directory");
        let config = folder.path().join("console.toml");
        let text = format!("[console]\nlisten = \"127.0.0.1:0\"\nsocket = {socket:?}\nnames = [\"console.test\"]\n");
        std::fs::write(&config, text).expect("a file");
        mccs_tests::open_to_all(folder.path());
        let mut command = Command::new(env!("CARGO_BIN_EXE_mccs-console"));
        command.arg("--config").arg(&config).env("RUST_LOG", "error").stdout(Stdio::piped());
        if let Some(uid) = uid {
            command.uid(uid);
        }
        let mut child = command.spawn().expect("starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.trim_end_matches(['/', '\n']).parse().ok());
        Console { child, address: address.unwrap_or_else(|| panic!("it says {line:?}")), _folder: folder }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).expect("a connection")
    }

    /// Sends bytes, and returns what comes until the other side closes.
    pub fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        let mut socket = self.connect();
        // It may have closed before all of it was sent.
        let _ = socket.write_all(bytes);
        let mut text = Vec::new();
        let _ = socket.read_to_end(&mut text);
        text
    }

    /// A request of a program, with these headers besides.
    pub fn ask(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut text = format!("{method} {target} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            text += &format!("Host: {}\r\n", self.address);
        }
        if !body.is_empty() {
            text += &format!("Content-Length: {}\r\n", body.len());
        }
        headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
        answer(&self.raw(format!("{text}\r\n{body}").as_bytes()))
    }

    pub fn get(&self, target: &str) -> Answer {
        self.ask("GET", target, &[], "")
    }

    pub fn document(&self, path: &str) -> Value {
        let answer = self.get(&format!("/api/v1/{path}"));
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.json()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The parts of an answer.
pub fn answer(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|at| at == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head: {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8(bytes[..end].to_vec()).expect("text");
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a status");
    let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
    Answer { status, headers: lines.filter_map(header).collect(), body: bytes[end + 4..].to_vec() }
}
