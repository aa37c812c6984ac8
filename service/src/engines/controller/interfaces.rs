//! Network interfaces of this host, looked at again when the kernel says that there are others.
//!
//! What the kernel says is taken as a hint, and not read: what counts is what is there then. Containers that begin have several interfaces
//! made and renamed, so a moment passes before all are looked at.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};

use crate::controller::equipment::{INTERFACES_MAX, Interfaces, is_name};
use crate::transports::tcp;

/// From the first word of the kernel's until interfaces are looked at.
const TOGETHER: Duration = Duration::from_millis(100);
/// Words that are taken at a time; the rest is taken at the next poll.
const WORDS_MAX: usize = 256;
/// Interfaces, and addresses, which may have labels of their own.
const GROUPS: i32 = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR;

/// See the module's documentation.
pub(super) struct Watch {
    words: Option<OwnedFd>,
    look_at: Option<Instant>,
}

impl Watch {
    /// From now on the kernel says what becomes of them.
    pub(super) fn new() -> Self {
        let words = listen().inspect_err(|error| {
            tracing::warn!(%error, "the controller is told of the interfaces that there are now, and not of others when there are");
        });
        Watch { words: words.ok(), look_at: None }
    }

    /// Readable when there may be others.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.words.as_ref().map(AsFd::as_fd)
    }

    /// When [`Watch::changed`] is next due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.look_at
    }

    /// Whether those that there are may be others than when this was asked last.
    pub(super) fn changed(&mut self, is_readable: bool, now: Instant) -> bool {
        if is_readable && self.has_news() {
            self.look_at.get_or_insert(now + TOGETHER);
        }
        self.look_at.take_if(|at| *at <= now).is_some()
    }

    fn has_news(&self) -> bool {
        let Some(words) = &self.words else { return false };
        let mut has_news = false;
        for _ in 0..WORDS_MAX {
            // A word that is longer than the buffer is cut, and gone all the same.
            match recv(words.as_raw_fd(), &mut [0; 16], MsgFlags::MSG_DONTWAIT) {
                // Some were lost: there were any.
                Ok(_) | Err(Errno::ENOBUFS) => has_news = true,
                Err(Errno::EINTR) => {}
                Err(_) => break,
            }
        }
        has_news
    }
}

fn listen() -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let words = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    bind(words.as_raw_fd(), &NetlinkAddr::new(0, GROUPS as u32))?;
    Ok(words)
}

/// All that there are, as a topology may call them; `None` where the kernel does not say, or there are too many to tell.
pub(super) fn all() -> Option<Interfaces> {
    let mut all = tcp::interfaces().inspect_err(|error| tracing::warn!(%error, "interfaces are not known")).ok()?;
    all.retain(|name, _| is_name(name));
    let is_told = all.len() <= INTERFACES_MAX;
    is_told.then(|| {
        let down = (0..).zip(all.values()).filter(|(_, is_up)| !**is_up).map(|(place, _)| place).collect();
        Interfaces { all: all.into_keys().collect(), down }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_what_there_is() {
        let there = all().expect("it says");
        let all = &there.all;
        assert!(all.iter().any(|name| name == "lo") && there.names_down().all(|name| name != "lo"), "{there:?}");
        assert!(all.is_sorted() && all.windows(2).all(|names| names[0] != names[1]), "{all:?}");
    }

    /// A socket of the test's stands for the kernel's.
    #[test]
    fn words_are_taken_together_and_looked_at_a_moment_later() {
        let mut interfaces = Watch::new();
        let (ours, kernels) = std::os::unix::net::UnixDatagram::pair().expect("a pair");
        interfaces.words = Some(ours.into());
        let now = Instant::now();
        assert!(!interfaces.changed(true, now) && interfaces.next_deadline().is_none());
        for _ in 0..3 {
            kernels.send(&[0; 64]).expect("room");
        }
        // Nobody looks where nothing is readable.
        assert!(!interfaces.changed(false, now) && interfaces.next_deadline().is_none());
        assert!(!interfaces.changed(true, now));
        assert_eq!(interfaces.next_deadline(), Some(now + TOGETHER));
        // Others that come meanwhile put nothing off.
        kernels.send(&[0; 64]).expect("room");
        let later = now + TOGETHER / 2;
        assert!(!interfaces.changed(true, later));
        assert!(interfaces.changed(true, now + TOGETHER));
        assert!(!interfaces.changed(true, now + 3 * TOGETHER) && interfaces.next_deadline().is_none());
    }
}
