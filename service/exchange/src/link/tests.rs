//! A link whose path dies silently, over real sockets.

use std::net::Ipv4Addr;

use super::*;
use crate::keys;
use crate::tls::TlsFiles;
use mccs_net::lossy::lose;

/// One end: its links, and what has happened on them.
struct End {
    links: Links,
    events: Vec<LinkEvent>,
}

impl End {
    fn poll(&mut self, now: Instant) {
        self.links.tick(now);
        while let Some(event) = self.links.next_event(now) {
            self.events.push(event);
        }
        self.links.flush(now);
    }

    /// The link that came up last.
    fn up(&self) -> Option<LinkId> {
        let up = |event: &LinkEvent| if let LinkEvent::Up { link, .. } = event { Some(*link) } else { None };
        self.events.iter().rev().find_map(up)
    }

    fn lose_all(&self) {
        self.links.links.values().for_each(|link| lose(link.connection.stream(), 1));
    }
}

const HOSTS: [&str; 2] = ["a", "b"];

/// Hosts a and b, of which a connects.
fn ends() -> [End; 2] {
    let directory = tempfile::tempdir().expect("a directory");
    keys::make(&HOSTS, directory.path(), true).expect("keys");
    ends_with(&HOSTS.map(|host| keys::files(directory.path(), host)))
}

/// The same with these files.
fn ends_with(files: &[TlsFiles; 2]) -> [End; 2] {
    let names = HOSTS.map(|name| Name::new(name).expect("a name"));
    // Ports are free again before they are listened on: the loopback address of this process's number is nobody else's.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, high | 0x80, middle, low);
    let held = [(); 2].map(|()| TcpListener::bind((address, 0)).expect("a port"));
    let listens = held.each_ref().map(|listener| listener.local_addr().expect("an address"));
    drop(held);
    let hosts: Vec<_> = names.iter().cloned().zip(listens).collect();
    [0, 1].map(|place: usize| {
        let own = names[place].clone();
        let tls = Tls::load(&files[place], &own, &names).expect("files");
        let options = LinkOptions {
            own,
            hosts: hosts.clone(),
            listen: listens[place],
            handshake_timeout: Duration::from_secs(60),
            reconnect_max: Duration::from_millis(50),
            seed: 1,
        };
        End { links: Links::new(options, tls, Instant::now()).expect("a listener"), events: Vec::new() }
    })
}

fn connect(ends: &mut [End; 2]) {
    while ends.iter().any(|end| end.up().is_none()) {
        ends.iter_mut().for_each(|end| end.poll(Instant::now()));
        std::thread::yield_now();
    }
}

/// Operators renew keys host by host, as docs/OPERATING.md says.
#[test]
fn hosts_that_know_two_authorities_take_certificates_of_both() {
    let directory = tempfile::tempdir().expect("a directory");
    let [old, new] = ["old", "new"].map(|name| directory.path().join(name));
    let [of_old, of_new] = [&old, &new].map(|folder| {
        keys::make(&HOSTS, folder, false).expect("keys");
        HOSTS.map(|host| keys::files(folder, host))
    });
    let both = directory.path().join("authority.crt");
    let texts = [&of_old, &of_new].map(|files| std::fs::read_to_string(&files[0].authority).expect("a certificate"));
    std::fs::write(&both, texts.concat()).expect("a file");
    for of in [[&of_old, &of_new], [&of_new, &of_old]] {
        let files = [0, 1].map(|place: usize| TlsFiles { authority: both.clone(), ..of[place][place].clone() });
        connect(&mut ends_with(&files));
    }
}

#[test]
fn a_link_in_doubt_is_replaced_before_it_is_given_up() {
    let mut ends = ends();
    connect(&mut ends);
    let before = ends.each_ref().map(End::up);
    ends.iter().for_each(End::lose_all);
    let [a, b] = &mut ends;
    a.links.send(before[0].expect("up"), b"is anybody there?", Instant::now());
    let mut now = Instant::now();
    while a.links.links.len() < 2 {
        now = Instant::now();
        a.poll(now);
        std::thread::sleep(Duration::from_millis(1));
    }
    // From here on no time passes in which the old link could be given up.
    while a.up() == before[0] || b.up() == before[1] {
        [&mut *a, &mut *b].into_iter().for_each(|end| end.poll(now));
        std::thread::yield_now();
    }
    let is_up = |event: &LinkEvent| matches!(event, LinkEvent::Up { .. });
    assert!(a.events.iter().chain(&b.events).all(is_up), "{:?} {:?}", a.events, b.events);
    // The protocol closes the old one; nobody dials on.
    a.links.close(before[0].expect("up"), now);
    assert_eq!(a.links.peers.next_deadline(), None);
}
