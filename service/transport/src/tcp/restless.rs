//! A transport whose connections go on over other sockets for no reason, at random: what that must not change, the suite checks.

use super::super::conformance::Random;
use super::{Half, TcpTransport};

/// One in so many polls moves a connection.
const ONE_IN: u64 = 20;

impl TcpTransport {
    pub(super) fn restless(self, seed: u64) -> Self {
        TcpTransport { restless: Some(Random(seed)), ..self }
    }

    pub(super) fn shake(&mut self) {
        let Some(random) = &mut self.restless else { return };
        if random.below(ONE_IN) > 0 {
            return;
        }
        let (turn, number) = (random.next(), random.next());
        let senders: Vec<_> = self
            .flows
            .iter()
            .filter(|(_, flow)| matches!(flow.half, Half::Send(_)))
            .map(|(handle, _)| handle)
            .collect();
        let Some(handle) = turn.checked_rem(senders.len() as u64).and_then(|turn| senders.get(turn as usize)) else {
            return;
        };
        let Some(Half::Send(sender)) = self.flows.get(*handle).map(|flow| &flow.half) else { return };
        let connections = sender.sockets().count() as u64;
        let Some(connection) = number.checked_rem(connections) else { return };
        if self.dial(*handle, connection as u16).is_ok()
            && let Some(Half::Send(sender)) = self.flows.get_mut(*handle).map(|flow| &mut flow.half)
        {
            sender.force(connection as u16);
        }
    }
}
