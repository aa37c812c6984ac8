//! Server: takes connections, as many as there is room for, and serves each.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use mccs_config::console::ConsoleSection;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::desk::Desk;
use crate::gate::Gate;
use crate::handler::Handler;
use crate::io::{Io, Stage};

/// Connections at a time. A browser has six.
const CONNECTIONS_MAX: usize = 192;
/// Connections of one address: a client that holds all of these keeps no other address out.
const CONNECTIONS_OF_ADDRESS_MAX: usize = 96;
/// Longest head of a request.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Headers of a request.
const HEADERS_MAX: usize = 64;
/// Bytes of answers that the kernel keeps for a peer that takes none, doubled by it. Otherwise that is some megabytes a connection.
const SEND_BUFFER_BYTES: u32 = 128 << 10;
/// Connections that wait to be taken.
const BACKLOG: u32 = 1024;
/// Pause when the process is out of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Listens, and serves.
pub struct Server {
    listener: TcpListener,
    handler: Arc<Handler>,
    room: Arc<Room>,
}

impl Server {
    /// Listens where the configuration says.
    ///
    /// # Errors
    /// The kernel's refusal of the address.
    pub fn listen(config: &ConsoleSection) -> anyhow::Result<Self> {
        let listener = listen_on(config.listen.0).with_context(|| format!("cannot listen on {}", config.listen.0))?;
        let handler = Handler::new(Gate::new(&config.names), Desk::new(config.socket.clone()));
        Ok(Server { listener, handler: Arc::new(handler), room: Arc::default() })
    }

    /// Its listening address: with the port that the kernel has chosen, if the configuration left that to it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until it is dropped.
    pub async fn serve(self) {
        loop {
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "no connection is taken");
                    tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
                    continue;
                }
            };
            // Without room it is closed: a browser tries again.
            if let Some(place) = Place::take(&self.room, peer.ip()) {
                tokio::spawn(serve(stream, Arc::clone(&self.handler), place));
            }
        }
    }
}

/// Connections have its send buffer.
fn listen_on(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn serve(stream: TcpStream, handler: Arc<Handler>, place: Place) {
    let _place = place;
    let Ok(own) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let stage = Stage::default();
    let io = Io::new(stream, stage.clone());
    let service = service_fn(|request| {
        stage.answering();
        let (handler, stage) = (Arc::clone(&handler), stage.clone());
        async move {
            let answer = handler.answer(request, own).await;
            stage.answered();
            Ok::<_, Infallible>(answer)
        }
    });
    let mut builder = http1::Builder::new();
    // The connection has its own times.
    builder.header_read_timeout(None).max_buf_size(HEAD_BYTES_MAX).max_headers(HEADERS_MAX).half_close(false);
    if let Err(error) = builder.serve_connection(io, service).await {
        tracing::debug!(%error, "a connection ended");
    }
}

/// Connections by address.
#[derive(Default)]
struct Room(Mutex<BTreeMap<IpAddr, usize>>);

/// A connection's place.
struct Place {
    room: Arc<Room>,
    address: IpAddr,
}

impl Place {
    fn take(room: &Arc<Room>, address: IpAddr) -> Option<Self> {
        let mut taken = room.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, own) = (taken.values().sum::<usize>(), taken.get(&address).copied().unwrap_or(0));
        if all >= CONNECTIONS_MAX || own >= CONNECTIONS_OF_ADDRESS_MAX {
            return None;
        }
        *taken.entry(address).or_default() += 1;
        Some(Place { room: Arc::clone(room), address })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.room.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.address) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_takes_all_its_places_keeps_no_other_out() {
        let (room, address) = (Arc::<Room>::default(), |last: u8| IpAddr::from([10, 0, 0, last]));
        let held: Vec<_> = (0..CONNECTIONS_OF_ADDRESS_MAX).map(|_| Place::take(&room, address(1))).collect();
        assert!(held.iter().all(Option::is_some) && Place::take(&room, address(1)).is_none());
        assert!(Place::take(&room, address(2)).is_some());
        drop(held);
        assert!(Place::take(&room, address(1)).is_some() && room.0.lock().unwrap().is_empty());
    }
}
