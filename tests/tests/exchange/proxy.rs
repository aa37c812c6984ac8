//! Something between two hosts that slows their bytes down, or breaks their connections.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::fixture::free_address;

/// The proxy's treatment of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Harm {
    /// Each connection breaks after so many bytes one way.
    pub break_after_bytes: usize,
    /// Pause after each KiB.
    pub pause: Duration,
}

pub struct Proxy {
    pub address: SocketAddr,
    /// Connections so far.
    pub connections: Arc<AtomicUsize>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    stop: Arc<AtomicBool>,
}

impl Proxy {
    pub fn start(to: SocketAddr, harm: Harm) -> Self {
        let proxy =
            Proxy { address: free_address(), connections: Arc::default(), open: Arc::default(), stop: Arc::default() };
        let listener = TcpListener::bind(proxy.address).unwrap();
        let (connections, open, stop) =
            (Arc::clone(&proxy.connections), Arc::clone(&proxy.open), Arc::clone(&proxy.stop));
        std::thread::spawn(move || {
            for from in listener.incoming().map_while(Result::ok) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let Ok(to) = TcpStream::connect(to) else { continue };
                connections.fetch_add(1, Ordering::Relaxed);
                for (from, to) in [(&from, &to), (&to, &from)] {
                    open.lock().unwrap().push(from.try_clone().unwrap());
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || carry(from, to, harm));
                }
            }
        });
        proxy
    }

    /// Breaks all connections there are.
    pub fn break_all(&self) {
        self.open.lock().unwrap().drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.break_all();
        let _ = TcpStream::connect(self.address);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, harm: Harm) {
    let mut bytes = [0; 1024];
    let mut left = harm.break_after_bytes;
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        std::thread::sleep(harm.pause);
        let now = count.min(left);
        left -= now;
        if to.write_all(&bytes[..now]).is_err() || left == 0 {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
