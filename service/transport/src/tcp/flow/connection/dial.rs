//! Dials a TCP connection: connect, hello, and the peer's answer.

use std::time::Instant;

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use super::Connection;
use crate::Fault;
use crate::tcp::socket::peer_gone;
use crate::tcp::socket::{Moved, Socket};
use crate::tcp::wire::{Hello, RESUMED_BYTES, VERDICT_BYTES, Verdict, check_resumed};

const NO_ANSWER: Fault = Fault::Refused("it closes the connection without an answer");

/// How far a dialled socket is.
#[derive(Debug)]
pub(in crate::tcp) enum Stage {
    Connecting,
    Greeting { sent: usize },
    Waiting { bytes: [u8; RESUMED_BYTES], got: usize },
}

#[derive(Debug)]
pub(in crate::tcp) struct Dial {
    pub(in crate::tcp) socket: Socket,
    pub(in crate::tcp) watch: Handle,
    pub(in crate::tcp) stage: Stage,
    pub(in crate::tcp) readable: bool,
    pub(in crate::tcp) writable: bool,
    resumption: u32,
    /// Path that it goes by, as the sender counts paths.
    pub(in crate::tcp) path: usize,
    /// Looks that have found it where it was.
    pub(in crate::tcp) looks: u32,
    /// Its hello was heard: since when it waits, and when to ask next.
    pub(in crate::tcp) waits: Option<[Instant; 2]>,
    /// Whether it is wanted also where the line's path is well: only tests want that.
    is_forced: bool,
}

impl Dial {
    /// Whether the peer's kernel has the hello, and its service has not answered.
    pub(in crate::tcp) fn is_heard(&self) -> bool {
        matches!(self.stage, Stage::Waiting { .. }) && self.socket.unacknowledged() == Some(0)
    }
}

impl Connection {
    /// A socket has begun to connect, over a path. Returns the watch of one that is closed for it.
    pub(in crate::tcp) fn dial(&mut self, socket: Socket, watch: Handle, path: usize) -> Option<Handle> {
        let resumption = self.dials;
        self.dials += 1;
        let useless = self.give_dial_up();
        let (stage, looks, waits) = (Stage::Connecting, 0, None);
        let (readable, writable, is_forced) = (false, false, false);
        self.dial = Some(Dial { socket, watch, stage, readable, writable, resumption, path, looks, waits, is_forced });
        useless
    }

    /// A dialled socket takes the line's place, whatever the line does.
    pub(in crate::tcp) fn force(&mut self) {
        self.dial.iter_mut().for_each(|dial| dial.is_forced = true);
    }

    /// Whether what is dialled is not needed, since the line answers.
    pub(in crate::tcp) fn is_dial_idle(&self) -> bool {
        self.dial.as_ref().is_some_and(|dial| !dial.is_forced)
            && self.is_open()
            && !self.is_cut
            && self.stall.looks == 0
    }

    /// Gives up what is being dialled. Returns its watch if its socket is closed.
    pub(in crate::tcp) fn give_dial_up(&mut self) -> Option<Handle> {
        let dial = self.dial.take()?;
        if matches!(dial.stage, Stage::Connecting) {
            dial.socket.close(false);
            return Some(dial.watch);
        }
        self.given_up.push((dial.socket, dial.watch));
        None
    }

    /// Goes on with what is being dialled: says hello, and reads the answer. Returns whether it got further. Watches of sockets
    /// that were closed go to `closed`.
    pub(in crate::tcp) fn go_on(&mut self, hello: &Hello, closed: &mut Vec<Handle>) -> Result<bool, Fault> {
        let (mut further, is_open) = (false, self.is_open());
        loop {
            let Some(dial) = &mut self.dial else { return Ok(further) };
            match &mut dial.stage {
                Stage::Connecting if dial.writable => {
                    dial.socket.connected().map_err(|fault| refused(is_open, fault))?;
                    if !dial.is_forced && self.has_progressed() {
                        // The old path is well again.
                        closed.extend(self.give_dial_up());
                        return Ok(true);
                    }
                    self.is_cut = self.line.is_some();
                    if let Some(dial) = &mut self.dial {
                        dial.stage = Stage::Greeting { sent: 0 };
                    }
                }
                Stage::Greeting { sent } => {
                    let hello = Hello { connection: self.number, resumption: dial.resumption, ..*hello }.encode();
                    let written = dial.socket.write_slice(&hello[*sent..]);
                    match written.map_err(|errno| refused(is_open, unanswered(errno)))? {
                        Moved::Bytes(bytes) => *sent += bytes,
                        Moved::WouldBlock | Moved::End => return Ok(further),
                    }
                    if *sent == hello.len() {
                        self.has_reached_peer = true;
                        dial.stage = Stage::Waiting { bytes: [0; RESUMED_BYTES], got: 0 };
                    }
                }
                Stage::Waiting { bytes, got } if dial.readable => {
                    let answer_bytes = if dial.resumption == 0 { VERDICT_BYTES } else { RESUMED_BYTES };
                    let read = dial.socket.read_slice(&mut bytes[*got..answer_bytes]);
                    match read.map_err(|errno| refused(is_open, unanswered(errno)))? {
                        Moved::Bytes(count) => *got += count,
                        Moved::WouldBlock => dial.readable = false,
                        Moved::End if *got >= VERDICT_BYTES => {
                            // A refusal is shorter than what an answer may be.
                            check_resumed(bytes).map_err(|fault| refused(is_open, fault))?;
                            return Err(refused(is_open, NO_ANSWER));
                        }
                        Moved::End => return Err(refused(is_open, NO_ANSWER)),
                    }
                    if *got == answer_bytes {
                        let received = if dial.resumption == 0 {
                            bytes.first_chunk().map_or(Ok(()), Verdict::check).map(|()| 0)
                        } else {
                            check_resumed(bytes)
                        };
                        let received = received.map_err(|fault| refused(is_open, fault))?;
                        self.open(received, closed)?;
                    }
                }
                Stage::Connecting | Stage::Waiting { .. } => return Ok(further),
            }
            further = true;
        }
    }
}

/// Meaning of a refusal: of a flow that was open, that the peer has closed it.
fn refused(is_open: bool, fault: Fault) -> Fault {
    if is_open && matches!(fault, Fault::Refused(_)) { Fault::Closed } else { fault }
}

fn unanswered(errno: Errno) -> Fault {
    match peer_gone(errno) {
        Fault::Closed => NO_ANSWER,
        fault => fault,
    }
}
