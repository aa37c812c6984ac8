//! Operators' words on links (`mccsctl link`), kept by the controller and all agents, so that they
//! outlive a controller.
//!
//! Every word has a number, higher than all before it about the same link, so that of two hosts' memories the newer one counts: a host
//! that was away while a link was mended does not break it again. So a link that is in order again is kept as well.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::links::link_name::LinkName;
use crate::links::link_state::LinkState;

/// Links of which something is kept; a network with more that are out of order is not described by its topology any more.
const LINKS_MAX: usize = 4096;
/// Links in a message: with the longest names they fit its body.
pub const LINKS_PER_MESSAGE: usize = 100;
/// Bytes of a name; a DNS name has no more.
const NAME_BYTES_MAX: usize = 253;

/// A word about a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkOverride {
    /// Leaf, or host.
    pub lower: String,
    /// Spine, or leaf.
    pub upper: String,
    /// How it is.
    pub state: LinkState,
    /// Its number.
    pub number: WordNumber,
}

/// A word's number: higher than those of all words before about the same link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct WordNumber {
    /// The life of the controller that was told.
    pub life: u64,
    /// Messages in it, and before, counted.
    pub count: u64,
}

impl From<(u64, u64)> for WordNumber {
    fn from((life, count): (u64, u64)) -> Self {
        WordNumber { life, count }
    }
}

impl From<WordNumber> for (u64, u64) {
    fn from(WordNumber { life, count }: WordNumber) -> Self {
        (life, count)
    }
}

/// How a link is, and the number of the word.
type Said = (LinkState, WordNumber);

/// See the module's documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkOverrides(BTreeMap<LinkName, Said>);

impl LinkOverrides {
    /// An operator says how a link is, in a life of the controller. Returns the word, where it is news.
    ///
    /// # Errors
    /// Too many links are out of order.
    pub fn say(
        &mut self,
        lower: &str,
        upper: &str,
        state: LinkState,
        life: u64,
    ) -> Result<Option<LinkOverride>, String> {
        let known = self.0.get(&LinkName { lower: lower.to_owned(), upper: upper.to_owned() });
        let (before, last) = known.copied().unwrap_or((LinkState::Up, WordNumber::default()));
        if before == state {
            return Ok(None);
        }
        // A clock that was set back makes no word older than the one before.
        let number = WordNumber { life: life.max(last.life), count: last.count.saturating_add(1) };
        let link = LinkOverride { lower: lower.to_owned(), upper: upper.to_owned(), state, number };
        match self.merge(link.clone()) {
            true => Ok(Some(link)),
            false => Err(format!("{LINKS_MAX} links are out of order already")),
        }
    }

    /// A word that somebody else has heard or kept. Returns whether it is newer than what was known, and there is room for it.
    pub fn merge(&mut self, link: LinkOverride) -> bool {
        let LinkOverride { lower, upper, state, number } = link;
        let key = LinkName { lower, upper };
        if self.0.get(&key).is_some_and(|(_, known)| *known >= number) {
            return false;
        }
        if self.0.len() >= LINKS_MAX && !self.0.contains_key(&key) && !self.make_room() {
            return false;
        }
        self.0.insert(key, (state, number));
        true
    }

    /// Forgets the link that has been in order for longest. Returns whether there is one.
    fn make_room(&mut self) -> bool {
        let in_order = self.0.iter().filter(|(_, (state, _))| *state == LinkState::Up);
        let oldest = in_order.min_by_key(|(_, (_, number))| *number).map(|(key, _)| key.clone());
        oldest.is_some_and(|key| self.0.remove(&key).is_some())
    }

    /// All of it, in parts that fit a message.
    pub fn messages(&self) -> impl Iterator<Item = Vec<LinkOverride>> {
        let link = |(LinkName { lower, upper }, (state, number)): (&LinkName, &Said)| LinkOverride {
            lower: lower.clone(),
            upper: upper.clone(),
            state: *state,
            number: *number,
        };
        let mut links = self.0.iter().map(link);
        std::iter::from_fn(move || {
            let part: Vec<_> = links.by_ref().take(LINKS_PER_MESSAGE).collect();
            (!part.is_empty()).then_some(part)
        })
    }

    /// Those that are not as the topology says.
    pub fn out_of_order(&self) -> impl Iterator<Item = (&LinkName, LinkState)> {
        self.0.iter().map(|(link, (state, _))| (link, *state)).filter(|(_, state)| *state != LinkState::Up)
    }
}

/// Checks what somebody else has told.
///
/// # Errors
/// The mistake in it, in words.
pub fn check(links: &[LinkOverride]) -> Result<(), &'static str> {
    let is_name = |name: &String| (1..=NAME_BYTES_MAX).contains(&name.len());
    if links.len() > LINKS_PER_MESSAGE {
        Err("it has too many links")
    } else if !links.iter().all(|link| is_name(&link.lower) && is_name(&link.upper)) {
        Err("it names a link that cannot be")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_word_about_a_link_counts_wherever_it_was_kept() {
        let (mut ours, mut theirs) = (LinkOverrides::default(), LinkOverrides::default());
        let down = ours.say("leaf0", "spine0", LinkState::Down, 5).unwrap().unwrap();
        assert!(theirs.merge(down.clone()) && !theirs.merge(down.clone()));
        assert_eq!(ours.say("leaf0", "spine0", LinkState::Down, 5), Ok(None), "said before");
        // The other one is away meanwhile, and the clock is set back.
        let up = ours.say("leaf0", "spine0", LinkState::Up, 3).unwrap().unwrap();
        assert!(!ours.merge(down), "an old word");
        assert_eq!(ours.out_of_order().count(), 0);
        let link = LinkName { lower: "leaf0".into(), upper: "spine0".into() };
        assert_eq!(theirs.out_of_order().collect::<Vec<_>>(), [(&link, LinkState::Down)]);
        assert!(theirs.merge(up));
        assert_eq!(theirs, ours);
        assert_eq!(ours.say("leaf1", "spine0", LinkState::Up, 9), Ok(None), "it never was anything else");
    }

    #[test]
    fn links_that_are_in_order_again_make_room_and_all_fit_messages() {
        let mut said = LinkOverrides::default();
        for number in 0..LINKS_MAX {
            assert!(said.say(&format!("leaf{number}"), "spine0", LinkState::Down, 1).unwrap().is_some());
        }
        assert!(said.say("leaf", "spine0", LinkState::Down, 1).unwrap_err().contains("4096"));
        said.say("leaf7", "spine0", LinkState::Up, 1).unwrap().unwrap();
        assert!(said.say("leaf", "spine0", LinkState::Down, 1).unwrap().is_some());
        assert_eq!(said.messages().map(|part| part.len()).sum::<usize>(), LINKS_MAX);
        assert!(said.messages().all(|part| check(&part).is_ok()));
        let name = "n".repeat(NAME_BYTES_MAX);
        let link = LinkOverride {
            lower: name.clone(),
            upper: name,
            state: LinkState::Down,
            number: WordNumber { life: u64::MAX, count: u64::MAX },
        };
        let links = vec![link.clone(); LINKS_PER_MESSAGE];
        assert!(crate::messages::message::AgentMessage::Kept { links }.encode().is_ok());
        assert!(check(&vec![link; LINKS_PER_MESSAGE + 1]).is_err());
    }
}
