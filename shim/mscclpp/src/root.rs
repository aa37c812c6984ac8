//! The root of `mscclppCommInitRank`: rank 0 listens at an address, and gives the other ranks the
//! communicator's id.
//!
//! ```text
//! rank r --> mark, r, nranks --> rank 0
//!        <-- 0, id  |  1, text  <--
//! ```
//!
//! Whoever reaches the address and knows this protocol gets the id, as with MSCCL++: an id that travels by other means tells nobody else.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use mccs::{Error, ErrorClass};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::invalid_argument;
use super::unique_id::CUniqueId;

const MARK: [u8; 8] = *b"mscclpp1";
const QUESTION_BYTES: usize = MARK.len() + 8;
/// How long one that has connected may take for its question: others wait so long for their turn.
const QUESTION_MAX: Duration = Duration::from_secs(1);
/// How long a rank waits before it tries again to reach a root that is not there yet.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// A rank among others, until when it waits for them.
#[derive(Clone, Copy)]
pub(crate) struct Seeker {
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
    pub(crate) until: Instant,
}

fn address_of(text: &str) -> Result<SocketAddr, Error> {
    text.parse().map_err(|_| invalid_argument(format!("{text:?} is no address: ip:port, such as 10.0.0.1:50000")))
}

fn late(message: String) -> Error {
    Error::refused(ErrorClass::Timeout, message)
}

/// The id of a communicator whose root is at an address: made by rank 0, and asked for by the others.
pub(crate) fn find_id(address: &str, seeker: Seeker) -> Result<CUniqueId, Error> {
    let address = address_of(address)?;
    if seeker.rank > 0 {
        return ask(address, seeker);
    }
    let id = CUniqueId::new()?;
    if seeker.nranks > 1 {
        serve(address, seeker, &id)?;
    }
    Ok(id)
}

/// Gives all other ranks the id.
fn serve(address: SocketAddr, seeker: Seeker, id: &CUniqueId) -> Result<(), Error> {
    let system =
        |error: std::io::Error| Error::refused_by_system(format_args!("rank 0 cannot listen at {address}"), error);
    let listener = TcpListener::bind(address).map_err(system)?;
    listener.set_nonblocking(true).map_err(system)?;
    let mut missing: BTreeSet<u32> = (1..seeker.nranks).collect();
    let mut refused = String::new();
    while !missing.is_empty() {
        let left = seeker.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let missing: Vec<String> = missing.iter().map(u32::to_string).collect();
            return Err(late(format!("ranks {} have not come to {address} in time{refused}", missing.join(", "))));
        }
        let mut waits = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut waits, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(system(error.into())),
        }
        // One that has gone again, or a stranger, costs nobody else anything.
        let Ok((mut stream, from)) = listener.accept() else { continue };
        let Ok(question) = read_question(&mut stream, left) else { continue };
        let answered = match check(question, seeker, &missing) {
            Ok(rank) => answer(&mut stream, 0, &id.0).map(|()| _ = missing.remove(&rank)),
            Err(wrong) => {
                refused = format!("; {from} was refused: {wrong}");
                answer(&mut stream, 1, wrong.as_bytes())
            }
        };
        // A rank that has not got it asks again.
        drop(answered);
    }
    Ok(())
}

/// The rank that asks.
fn check([rank, nranks]: [u32; 2], root: Seeker, missing: &BTreeSet<u32>) -> Result<u32, String> {
    if nranks != root.nranks {
        return Err(format!("rank {rank} is one of {nranks}, rank 0 one of {}", root.nranks));
    }
    if missing.contains(&rank) { Ok(rank) } else { Err(format!("rank {rank} is there already, or no rank")) }
}

fn read_question(stream: &mut TcpStream, left: Duration) -> std::io::Result<[u32; 2]> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(left.min(QUESTION_MAX)))?;
    stream.set_write_timeout(Some(QUESTION_MAX))?;
    let mut question = [0; QUESTION_BYTES];
    stream.read_exact(&mut question)?;
    let (mark, numbers) = question.split_at(MARK.len());
    if mark != MARK {
        return Err(ErrorKind::InvalidData.into());
    }
    let number = |at: usize| u32::from_le_bytes([numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]]);
    Ok([number(0), number(4)])
}

fn answer(stream: &mut TcpStream, refused: u8, content: &[u8]) -> std::io::Result<()> {
    let mut answer = vec![refused];
    answer.extend_from_slice(content);
    stream.write_all(&answer)
}

/// Asks rank 0 for the id, again and again until it is there.
fn ask(address: SocketAddr, seeker: Seeker) -> Result<CUniqueId, Error> {
    loop {
        let left = seeker.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late(format!("rank 0 has not answered at {address} in time")));
        }
        match ask_once(address, seeker, left) {
            Ok(id) => return id,
            Err(_) => std::thread::sleep(RETRY_AFTER.min(left)),
        }
    }
}

fn ask_once(address: SocketAddr, seeker: Seeker, left: Duration) -> std::io::Result<Result<CUniqueId, Error>> {
    let mut stream = TcpStream::connect_timeout(&address, left)?;
    stream.set_read_timeout(Some(left))?;
    let mut question = MARK.to_vec();
    question.extend_from_slice(&seeker.rank.to_le_bytes());
    question.extend_from_slice(&seeker.nranks.to_le_bytes());
    stream.write_all(&question)?;
    let mut answer = Vec::new();
    stream.take(4096).read_to_end(&mut answer)?;
    match answer.split_first() {
        Some((0, id)) if id.len() == CUniqueId::BYTES => {
            let mut bytes = [0; CUniqueId::BYTES];
            bytes.copy_from_slice(id);
            Ok(Ok(CUniqueId(bytes)))
        }
        Some((1, text)) => Ok(Err(invalid_argument(format!("rank 0 refuses: {}", String::from_utf8_lossy(text))))),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}
