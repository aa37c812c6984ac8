//! A transport whose connections go on over other sockets for no reason, at random: what that must not change, the suite checks.

use mccs_ipc::types::Handle;

use crate::conformance::Random;
use crate::tcp::TcpTransport;
use crate::tcp::flow::{Flow, Half};

/// One in so many polls moves a connection.
const ONE_IN: u64 = 20;

impl TcpTransport {
    pub(in crate::tcp) fn restless(self, seed: u64) -> Self {
        TcpTransport { restless: Some(Random(seed)), ..self }
    }

    pub(in crate::tcp) fn shake(&mut self) {
        let Some(random) = &mut self.restless else { return };
        if random.below(ONE_IN) > 0 {
            return;
        }
        let (turn, number) = (random.next(), random.next());
        let is_sender = |handle: &Handle| matches!(self.flows.get(*handle), Some(Flow { half: Half::Send(_), .. }));
        let senders: Vec<Handle> = self.flows.handles().filter(is_sender).collect();
        let Some(handle) = turn.checked_rem(senders.len() as u64).and_then(|turn| senders.get(turn as usize)) else {
            return;
        };
        let Some(Half::Send(sender)) = self.flows.get(*handle).map(|flow| &flow.half) else { return };
        let connections = sender.sockets().count() as u64;
        let Some(connection) = number.checked_rem(connections) else { return };
        self.paths.leave(*handle, connection as u16, &mut self.flows, &mut self.watches);
    }
}
