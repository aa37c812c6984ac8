//! Browsers that go before they are answered, and answers that take long.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use mccs_control::{Call, Chunk, ControlAnswer, ControlRequest, chunks};
use mccs_ipc::handshake::{Listener, Socket};
use mccs_tests::TestService;

use super::fixture::{Console, answer};

/// A service that refuses what it can answer itself, and answers nothing that it would ask others.
#[derive(Default)]
struct Slow {
    /// Questions to all hosts that came.
    cluster: AtomicUsize,
    is_over: AtomicBool,
}

impl Slow {
    fn serve(self: &Arc<Self>, path: &Path) -> std::thread::JoinHandle<()> {
        let (listener, slow) = (Listener::bind(path).expect("listens"), Arc::clone(self));
        std::thread::spawn(move || {
            while !slow.is_over.load(Ordering::Relaxed) {
                match listener.accept().expect("accepts") {
                    Some((socket, _)) => {
                        let slow = Arc::clone(&slow);
                        std::thread::spawn(move || slow.answer(&socket));
                    }
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        })
    }

    /// Until the console has gone, if that is sooner.
    fn answer(&self, socket: &Socket) -> Option<()> {
        while socket.recv_hello().ok()?.is_none() {
            let _ = socket.wait_readable(Duration::from_secs(1));
        }
        socket.send_hello(0).ok()?;
        let mut text = Vec::new();
        loop {
            let Some((Chunk { more, bytes }, _)) = socket.recv::<Chunk>().ok()? else {
                let _ = socket.wait_readable(Duration::from_secs(1));
                continue;
            };
            text.extend(bytes);
            if !more {
                break;
            }
        }
        let call: Call = serde_json::from_slice(&text).expect("a request");
        if matches!(call.request, ControlRequest::Cluster { .. }) {
            self.cluster.fetch_add(1, Ordering::Relaxed);
        }
        if matches!(call.request, ControlRequest::Cluster { .. } | ControlRequest::WhyStuck { .. }) {
            while !self.is_over.load(Ordering::Relaxed) && !socket.is_closed() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return None;
        }
        let refused = serde_json::to_vec(&ControlAnswer::Refused("not now".into())).expect("JSON");
        chunks(&refused).iter().try_for_each(|chunk| socket.send(chunk, &[])).ok()
    }
}

#[test]
fn who_goes_before_the_answer_keeps_no_overview_waiting_and_asks_once() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("slow.sock");
    let slow = Arc::<Slow>::default();
    let serving = slow.serve(&path);
    let console = Console::start(&path);
    let ask_and_go = |target: &str| {
        let mut socket = console.connect();
        socket.write_all(format!("GET /api/v1/{target} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).expect("sent");
    };
    ask_and_go("cluster");
    while slow.cluster.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    (0..50).for_each(|_| ask_and_go("cluster"));
    (0..20).for_each(|number| ask_and_go(&format!("communicators/{number}/why-stuck")));
    for _ in 0..3 {
        assert_eq!(console.get("/api/v1/overview").code(), "refused", "the service has been asked");
    }
    // All turns are taken, and nobody waits for ever.
    let busy = console.get("/api/v1/communicators/4711/why-stuck");
    assert_eq!((busy.status, busy.code().as_str()), (503, "busy"));
    assert_eq!(slow.cluster.load(Ordering::Relaxed), 1, "one question answers all, also those who have gone");
    slow.is_over.store(true, Ordering::Relaxed);
    serving.join().expect("it ends");
}

/// A head has five seconds, which are over when the answer comes.
#[test]
fn a_connection_whose_answer_took_long_is_left_when_it_says_nothing_more() {
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    let mut socket = console.connect();
    socket.write_all(b"POST /api/v1/trace?seconds=6 HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("sent");
    let mut text = Vec::new();
    socket.read_to_end(&mut text).expect("it is closed in the end");
    assert_eq!(answer(&text).status, 200);
}
