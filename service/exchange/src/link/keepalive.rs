//! Keepalive of links between hosts: a silent link is doubted, then made anew over another port, so
//! another path. A link over which nothing is answered is made anew soon. The host behind it has
//! longer, since it may be well. The network's control goes over links, and waits for them when a
//! path has died: so another path is looked for while the link is still there.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use mccs_net::tcp_info::{TcpInfo, tcp_info, unacknowledged};

/// How often links are looked at while something is owed.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A path is in doubt when more looks than this have found no answer: twice as long as acknowledgements are usually delayed.
const DOUBTFUL_LOOKS: u32 = 2;
/// A path is dead when more looks than this have found no answer.
const LOOKS: u32 = 6;
/// An attempt to connect has so many at first.
const CONNECTING_LOOKS: u32 = 3;

/// Results of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing is owed.
    Nothing,
    /// Something is, and may come.
    Owed,
    /// Something is, and should have come.
    Doubtful,
    /// Nothing has come for too long.
    Dead,
}

/// For how long a link has brought no answer.
#[derive(Debug)]
pub(super) struct Keepalive {
    /// Looks until an attempt to connect is given up.
    connecting_looks: u32,
    looks: u32,
    looked_at: Option<Instant>,
}

impl Keepalive {
    /// Time-outs of a link to a host that so many attempts have not reached: the first ones are short, since another may find
    /// another path.
    pub(super) fn after(failures: u32) -> Self {
        Keepalive { connecting_looks: CONNECTING_LOOKS << (failures / 2).min(6), looks: 0, looked_at: None }
    }

    /// Looks at a connection's socket.
    pub(super) fn look(&mut self, stream: &TcpStream, is_connecting: bool, now: Instant) -> Found {
        let since_look = self.looked_at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        if is_connecting {
            // Whether it is asked a second time is not told.
            self.looks += 1;
            return if self.looks > self.connecting_looks { Found::Dead } else { Found::Owed };
        }
        if unacknowledged(stream).is_none_or(|bytes| bytes == 0) {
            self.looks = 0;
            return Found::Nothing;
        }
        // A peer that reads slowly has a full buffer, and all that was sent: the rest waits here. That it does not answer says
        // nothing.
        let is_silent = |info: &TcpInfo| info.last_answer > since_look && (info.is_under_way || info.is_owed);
        let Some(info) = tcp_info(stream).filter(is_silent) else {
            self.looks = 0;
            return Found::Owed;
        };
        self.looks += 1;
        match self.looks {
            looks if looks > LOOKS && info.is_owed => Found::Dead,
            looks if looks > DOUBTFUL_LOOKS => Found::Doubtful,
            _ => Found::Owed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write as _};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn who_reads_slowly_is_not_in_doubt() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (_reads_nothing, _) = listener.accept().expect("the other end");
        stream.set_nonblocking(true).expect("set");
        let mut silence = Keepalive::after(0);
        // Until it takes no more.
        loop {
            match stream.write(&[0; 1 << 16]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        for _ in 0..2 * LOOKS {
            let found = silence.look(&stream, false, Instant::now());
            assert_eq!(found, Found::Owed);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
