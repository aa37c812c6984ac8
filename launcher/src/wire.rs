//! Protocol between the launcher and its agents: frames over one channel each way.
//!
//! ```text
//! launcher                                agent
//!    | --- greeting ----------------------> |      neither side acts before it has seen the other's greeting
//!    | <---------------------- greeting --- |
//!    | --- Prepare -----------------------> |      folder and files; then Prepared, or Refused
//!    | --- Start, Signal, Ping -----------> |      in any order
//!    | <-- Started, Output, Ended, Closed - |      for each process in this order, or NotStarted alone
//!    X --- the channel closes ------------> |      everything is ended, the folder removed, the agent gone
//! ```
//!
//! A greeting is eight bytes, so that a shell's chatter, or an agent of another version, is recognised. A frame is a
//! length of four bytes, little endian, and that many bytes of postcard.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// First bytes of both sides; the last byte is the protocol's version.
pub const GREETING: [u8; 8] = *b"mccs-ag\x01";
/// Longest frame: a command line and its variables, which the kernel holds to 2 MiB, fit with room to spare.
const FRAME_BYTES_MAX: u32 = 8 << 20;

/// From the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToAgent {
    /// Comes first, and once.
    Prepare(Prepare),
    /// Start a process in a group of its own.
    Start(Start),
    /// Send a signal to a process's group; one that has ended gets none.
    Signal {
        /// The process.
        id: u32,
        /// The signal's number.
        signal: i32,
    },
    /// The launcher is alive.
    Ping,
}

/// A host's needs before anything is started on it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Prepare {
    /// Made for this user alone; removed at the end. Must not exist.
    pub runtime_dir: PathBuf,
    /// Names in that folder, and contents.
    pub files: Vec<(String, String)>,
    /// Programs that must be there, each with the folder that a path starts from.
    pub programs: Vec<(PathBuf, PathBuf)>,
    /// A launcher that says nothing for so long is gone.
    pub lost_after: Option<Duration>,
}

/// A process.
#[derive(Debug, Serialize, Deserialize)]
pub struct Start {
    /// Its number on both sides.
    pub id: u32,
    /// Name or path, looked up on the host.
    pub program: PathBuf,
    /// Arguments after it.
    pub arguments: Vec<String>,
    /// Variables added to the agent's own.
    pub env: BTreeMap<String, String>,
    /// Folder that it starts in; none for the agent's.
    pub working_dir: Option<PathBuf>,
}

/// From an agent.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromAgent {
    /// The host is ready, unless programs are missing.
    Prepared {
        /// Programs that were not found.
        missing: Vec<PathBuf>,
    },
    /// The host cannot be made ready.
    Refused {
        /// Why.
        reason: String,
    },
    /// A process runs.
    Started {
        /// The process.
        id: u32,
        /// Its number on the host.
        pid: i32,
    },
    /// A process could not be started.
    NotStarted {
        /// The process.
        id: u32,
        /// Why.
        reason: String,
    },
    /// Output of a process.
    Output {
        /// The process.
        id: u32,
        /// Any bytes.
        bytes: Vec<u8>,
    },
    /// A process has ended, and what was left in its group has been killed.
    Ended {
        /// The process.
        id: u32,
        /// As `wait` tells it.
        status: i32,
        /// From its start.
        after: Duration,
    },
    /// All that a process wrote has been sent.
    Closed {
        /// The process.
        id: u32,
    },
}

/// Writes one message as a frame.
///
/// # Errors
/// It is too long, holds a path that is no UTF-8, or the channel is closed.
pub fn write(channel: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let body = postcard::to_stdvec(message).context("a message cannot be written down")?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= FRAME_BYTES_MAX);
    let Some(length) = length else {
        bail!("a message has {} bytes, and at most {FRAME_BYTES_MAX} can be sent", body.len());
    };
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(&body);
    channel.write_all(&frame).context("the channel is closed")?;
    channel.flush().context("the channel is closed")
}

/// Reads one message; none where the channel was closed between two.
///
/// # Errors
/// The channel broke, or what came is no message.
pub fn read<T: DeserializeOwned>(channel: &mut impl Read) -> Result<Option<T>> {
    let mut length = [0; 4];
    let mut have = 0;
    while have < length.len() {
        match channel.read(&mut length[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => bail!("the channel closed within a message"),
            Ok(count) => have += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("the channel broke"),
        }
    }
    let length = u32::from_le_bytes(length);
    if length > FRAME_BYTES_MAX {
        bail!("a message claims {length} bytes, and at most {FRAME_BYTES_MAX} are sent");
    }
    let mut body = vec![0; length as usize];
    channel.read_exact(&mut body).context("the channel closed within a message")?;
    postcard::from_bytes(&body).context("what came is no message").map(Some)
}

/// Reads the other side's greeting; false where the channel closed before the first byte.
///
/// # Errors
/// Something else came: it is quoted.
pub fn read_greeting(channel: &mut impl Read) -> Result<bool> {
    let mut came = Vec::new();
    let wanted = GREETING.len() as u64;
    channel.by_ref().take(wanted).read_to_end(&mut came).context("the channel broke")?;
    let name = GREETING.len() - 1;
    match came.as_slice() {
        [] => Ok(false),
        came if *came == GREETING => Ok(true),
        [start @ .., version] if *start == GREETING[..name] => {
            bail!("it speaks version {version} of the launcher's protocol, and here is version {}", GREETING[name])
        }
        other => bail!("it wrote {:?} where its greeting should be", String::from_utf8_lossy(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let mut channel = Vec::new();
        let start = Start {
            id: 7,
            program: "sh".into(),
            arguments: vec!["-c".into(), "x y".into()],
            env: [("A".to_owned(), "1".to_owned())].into(),
            working_dir: None,
        };
        write(&mut channel, &ToAgent::Start(start)).unwrap();
        write(&mut channel, &ToAgent::Ping).unwrap();
        let mut reader = channel.as_slice();
        let Some(ToAgent::Start(start)) = read(&mut reader).unwrap() else { panic!("a start") };
        assert_eq!((start.id, start.arguments[1].as_str(), start.env["A"].as_str()), (7, "x y", "1"));
        assert!(matches!(read(&mut reader).unwrap(), Some(ToAgent::Ping)));
        assert!(read::<ToAgent>(&mut reader).unwrap().is_none());
    }

    #[test]
    fn what_is_no_message_is_refused_and_takes_no_memory() {
        assert!(read::<ToAgent>(&mut [1u8, 0].as_slice()).is_err());
        assert!(read::<ToAgent>(&mut [9u8, 0, 0, 0, 1].as_slice()).is_err());
        assert!(read::<ToAgent>(&mut [1u8, 0, 0, 0, 99].as_slice()).is_err());
        let huge = read::<ToAgent>(&mut [255u8; 8].as_slice()).unwrap_err().to_string();
        assert!(huge.contains("claims 4294967295 bytes"), "{huge}");
        assert!(write(&mut Vec::new(), &vec![0u8; 9 << 20]).is_err());
    }

    #[test]
    fn strangers_are_recognised_by_their_greeting() {
        let read = |bytes: &[u8]| read_greeting(&mut { bytes }).map_err(|error| error.to_string());
        assert_eq!(read(&GREETING), Ok(true));
        assert_eq!(read(b""), Ok(false));
        assert!(read(b"mccs-ag\x09").unwrap_err().contains("version 9"));
        assert!(read(b"Welcome to n1").unwrap_err().contains("\"Welcome \""));
    }
}
