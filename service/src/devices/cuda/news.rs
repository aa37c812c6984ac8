//! What the proxy engine is told, by every thread of the device and by its own.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::engines::proxy::ProxyMessage;
use crate::runtime::Sender;

/// News in order. Nobody waits for room in the proxy engine's mailbox, since its own thread tells news, too: it may drop what ends
/// an operation.
pub(super) struct News {
    proxy: Sender<ProxyMessage>,
    untold: Mutex<VecDeque<ProxyMessage>>,
}

impl News {
    pub(super) fn new(proxy: Sender<ProxyMessage>) -> Self {
        News { proxy, untold: Mutex::default() }
    }

    /// Tells now, or when the proxy engine next looks: a mailbox without room has it look again.
    pub(super) fn tell(&self, message: ProxyMessage) {
        self.push(Some(message));
    }

    /// Tells what found no room before. Called by the proxy engine when it has read its mailbox. Returns whether some still waits.
    pub(super) fn push_backlog(&self) -> bool {
        self.push(None)
    }

    fn push(&self, message: Option<ProxyMessage>) -> bool {
        let mut untold = self.untold.lock().unwrap_or_else(PoisonError::into_inner);
        untold.extend(message);
        while let Some(message) = untold.pop_front() {
            if let Err(message) = self.proxy.send(message) {
                untold.push_front(message);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::Handle;

    use super::*;
    use crate::runtime::Mailbox;

    #[test]
    fn nobody_waits_for_room_and_news_keep_their_order() {
        let mailbox = Mailbox::new(1);
        let news = News::new(mailbox.sender());
        let job = |index| Handle { index, generation: 1 };
        (0..3).for_each(|index| news.tell(ProxyMessage::JobDone { job: job(index), fault: None }));
        for index in 0..3 {
            assert_eq!(news.push_backlog(), index < 2);
            let told = mailbox.pop();
            assert!(matches!(told, Some(ProxyMessage::JobDone { job: told, .. }) if told == job(index)), "{index}");
        }
        assert!(mailbox.is_empty() && !news.push_backlog());
    }
}
