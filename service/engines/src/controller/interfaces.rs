//! Network interfaces of this host (netlink): which are up, read again when the kernel tells of
//! changes.
//!
//! The kernel's messages are taken as hints, and not read: the interfaces that are there then count. Containers that begin have several
//! interfaces made and renamed, so a moment passes before all are looked at. One that was down counts as down until it has been up for a
//! while: strategies are changed for it either way, and a bad cable comes and goes.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use mccs_controller::inventory::{INTERFACES_MAX, Interfaces, is_name};
use mccs_transport::tcp;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};

/// From the first word of the kernel's until interfaces are looked at.
const TOGETHER: Duration = Duration::from_millis(100);
/// How long one that was down has to be up, without having been down again as often as was looked.
const UP_FOR: Duration = Duration::from_secs(2);
/// Words that are taken at a time; the rest is taken at the next poll.
const WORDS_MAX: usize = 256;
/// Interfaces, and addresses, which may have labels of their own.
const GROUPS: i32 = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR;

/// See the module's documentation.
pub(super) struct Watch {
    words: Option<OwnedFd>,
    look_at: Option<Instant>,
    /// Those that count as down; and until when, where they are up.
    down: BTreeMap<String, Option<Instant>>,
}

impl Watch {
    /// From now on the kernel says what becomes of them.
    pub(super) fn new() -> Self {
        let words = listen().inspect_err(|error| {
            tracing::warn!(%error, "the controller is told of the interfaces that there are now, and not of others when there are");
        });
        Watch { words: words.ok(), look_at: None, down: BTreeMap::new() }
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
            let soon = now + TOGETHER;
            self.look_at = Some(self.look_at.map_or(soon, |at| at.min(soon)));
        }
        self.look_at.take_if(|at| *at <= now).is_some()
    }

    /// All that there are, as a topology may call them; `None` where the kernel does not say, or there are too many to tell.
    pub(super) fn all(&mut self, now: Instant) -> Option<Interfaces> {
        let found = tcp::interfaces().inspect_err(|error| tracing::warn!(%error, "interfaces are not known")).ok()?;
        let all: BTreeMap<String, bool> = found.into_iter().filter(|(name, _)| is_name(name)).collect();
        (all.len() <= INTERFACES_MAX).then(|| self.settled(all, now))
    }

    /// Interfaces, and whether they are up, of which some count as down for a while longer; these are looked at again.
    fn settled(&mut self, all: BTreeMap<String, bool>, now: Instant) -> Interfaces {
        self.down.retain(|name, _| all.contains_key(name));
        for (name, is_up) in &all {
            if !is_up {
                self.down.insert(name.clone(), None);
            } else if let Some(until) = self.down.get_mut(name)
                && *until.get_or_insert(now + UP_FOR) <= now
            {
                self.down.remove(name);
            }
        }
        self.look_at = self.down.values().flatten().min().copied();
        let down = (0..).zip(all.keys()).filter(|(_, name)| self.down.contains_key(*name)).map(|(place, _)| place);
        let down = down.collect();
        Interfaces { down, all: all.into_keys().collect() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_what_there_is() {
        let there = Watch::new().all(Instant::now()).expect("it says");
        let all = &there.all;
        assert!(all.iter().any(|name| name == "lo") && there.names_down().all(|name| name != "lo"), "{there:?}");
        assert!(all.is_sorted() && all.windows(2).all(|names| names[0] != names[1]), "{all:?}");
    }

    #[test]
    fn who_comes_and_goes_is_down_until_it_stays() {
        let (mut watch, began) = (Watch::new(), Instant::now());
        let mut look = |after: Duration, is_up: bool| {
            let all = [("eth0".to_owned(), true), ("eth1".to_owned(), is_up)].into_iter().collect();
            let down = watch.settled(all, began + after).names_down().map(str::to_owned).collect::<Vec<_>>();
            (down, watch.next_deadline().map(|at| at - began))
        };
        let second = Duration::from_secs(1);
        let is_down = || vec!["eth1".to_owned()];
        assert_eq!(look(Duration::ZERO, true), (vec![], None));
        assert_eq!(look(second, false), (is_down(), None), "at once");
        assert_eq!(look(2 * second, true), (is_down(), Some(2 * second + UP_FOR)));
        assert_eq!(look(3 * second, false), (is_down(), None));
        assert_eq!(look(4 * second, true), (is_down(), Some(4 * second + UP_FOR)));
        assert_eq!(
            look(5 * second, true),
            (is_down(), Some(4 * second + UP_FOR)),
            "counted from when it was first seen up"
        );
        assert_eq!(look(4 * second + UP_FOR, true), (vec![], None));
        assert_eq!(look(9 * second, false).0, is_down(), "at once, again");
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
