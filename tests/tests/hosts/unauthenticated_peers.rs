//! Whoever reaches the ports of a service: bytes of any kind, half greetings, thousands of connections. Collectives go on beside them,
//! checked.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd as _;

use mccs_tests::hosts::TestHosts;
use mccs_tests::seeds;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::transports::beside_collectives;

/// Connections that a stranger keeps.
const KEPT_MAX: usize = 300;
/// Connections of a sequence.
const CONNECTIONS: usize = 1500;

/// Ports of this process at an address.
fn listens_at(address: Ipv4Addr) -> Vec<SocketAddr> {
    const LISTEN: &str = "0A";
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("sockets");
    let of = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let (host, port) = words.get(1)?.split_once(':')?;
        let host = Ipv4Addr::from(u32::from_str_radix(host, 16).ok()?.to_ne_bytes());
        let port = u16::from_str_radix(port, 16).ok()?;
        (host == address && words.get(3) == Some(&LISTEN)).then(|| SocketAddr::new(IpAddr::V4(host), port))
    };
    table.lines().filter_map(of).collect()
}

/// Connects from an address of this machine; none where the port has no room for now.
fn from(own: Ipv4Addr, to: SocketAddr) -> Option<TcpStream> {
    let SocketAddr::V4(to) = to else { return None };
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).ok()?;
    let [a, b, c, d] = own.octets();
    bind(fd.as_raw_fd(), &SockaddrIn::new(a, b, c, d, 0)).ok()?;
    connect(fd.as_raw_fd(), &SockaddrIn::from(to)).ok()?;
    Some(TcpStream::from(fd))
}

/// A stranger's bytes: nothing, anything, or the beginning of a greeting of ours and then anything.
fn says(rng: &mut StdRng) -> Vec<u8> {
    let heads: [&[u8]; 5] = [b"", b"mccs-tcp", b"mccs-tcp\x02\0\0\0", b"GET / HTTP/1.1\r\n", &[0x16, 3, 1, 2, 0, 1]];
    let head = heads[rng.random_range(0..heads.len())];
    let bytes = (0..rng.random_range(0..200)).map(|_| rng.random::<u8>());
    head.iter().copied().chain(bytes).collect()
}

#[test]
fn strangers_at_every_port_harm_no_collective() {
    let hosts = TestHosts::start(2, "");
    let [own, other] = [0, 1].map(|host| hosts.address(host));
    beside_collectives(&hosts, &[0, 1, 1, 0], |work| {
        // Flows have a port of their own, besides the exchange's.
        work.more();
        let ports = listens_at(own);
        assert!(ports.len() >= 2, "{ports:?}");
        for seed in seeds(2) {
            println!("MCCS_SEED={seed}");
            let mut rng = StdRng::seed_from_u64(seed);
            let mut kept = Vec::new();
            for _ in 0..CONNECTIONS {
                // A host of the cluster, and one that nobody knows.
                let source = if rng.random() { other } else { Ipv4Addr::LOCALHOST };
                let Some(mut stranger) = from(source, ports[rng.random_range(0..ports.len())]) else { continue };
                // The other side may have hung up.
                let _ = stranger.write_all(&says(&mut rng));
                if rng.random() {
                    kept.push(stranger);
                }
                if kept.len() > KEPT_MAX {
                    kept.swap_remove(rng.random_range(0..kept.len()));
                }
            }
            work.more();
        }
    });
    // Admitted peers get in as before.
    beside_collectives(&hosts, &[0, 1], |work| work.more());
}
