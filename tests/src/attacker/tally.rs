//! Tally of what attackers have done, and what they were answered.

use std::collections::BTreeMap;

use mccs_ipc::types::ErrorClass;

/// Most different things that are counted: messages may be of any number of kinds.
const KINDS_MAX: usize = 1000;
/// Characters of a message that count.
const MESSAGE_CHARS: usize = 80;

/// The result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was sent.
    Sent,
    /// It was done.
    Done,
    /// It was refused.
    Refused,
}

/// Numbers by what they count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    /// One more of something.
    pub fn count(&mut self, what: &str) {
        self.count_many(what, 1);
    }

    /// So many more of something.
    pub fn count_many(&mut self, what: &str, more: u64) {
        if let Some(count) = self.0.get_mut(what) {
            *count += more;
        } else if self.0.len() < KINDS_MAX {
            self.0.insert(what.to_owned(), more);
        }
    }

    /// One more request of this name with this outcome.
    pub fn count_request(&mut self, name: &str, outcome: Outcome) {
        self.count(&Self::request(name, outcome));
    }

    /// One more error in a kind of answer: by its class, and by its message, in which all numbers are the same.
    pub fn count_error(&mut self, of: &str, class: Option<ErrorClass>, message: &str) {
        self.count(&format!("{of}, {}", class.map_or("class unknown", ErrorClass::name)));
        self.count(&format!("message: {}", without_numbers(message)));
    }

    /// How many requests of this name have had this outcome.
    #[must_use]
    pub fn of_request(&self, name: &str, outcome: Outcome) -> u64 {
        self.0.get(&Self::request(name, outcome)).copied().unwrap_or(0)
    }

    fn request(name: &str, outcome: Outcome) -> String {
        format!("{name} {}", format!("{outcome:?}").to_lowercase())
    }

    /// All numbers.
    #[must_use]
    pub fn counts(&self) -> &BTreeMap<String, u64> {
        &self.0
    }

    /// Adds another one to it.
    pub fn add(&mut self, other: &Tally) {
        other.0.iter().for_each(|(what, count)| self.count_many(what, *count));
    }

    /// As a line of JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.0).expect("invariant: a map of numbers has a form in JSON")
    }

    /// Reads the text of [`Tally::to_json`].
    ///
    /// # Errors
    /// It is something else.
    pub fn from_json(line: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(line).map(Tally)
    }
}

fn without_numbers(message: &str) -> String {
    let mut words = String::new();
    for character in message.chars() {
        let character = if character.is_ascii_digit() { '#' } else { character };
        if character != '#' || !words.ends_with('#') {
            words.push(character);
        }
    }
    words.replace("Handle { index: #, generation: # }", "(handle)").chars().take(MESSAGE_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_differ_in_numbers_are_one_and_tallies_add_up() {
        let mut one = Tally::default();
        one.count_error("refused", Some(ErrorClass::InvalidUsage), "region 12 has 4096 bytes");
        one.count_error("refused", Some(ErrorClass::InvalidUsage), "region 7 has 64 bytes");
        one.count_request("AllocMemory", Outcome::Sent);
        let mut both = Tally::from_json(&one.to_json()).expect("its own form");
        assert_eq!(both, one);
        both.add(&one);
        assert_eq!(both.of_request("AllocMemory", Outcome::Sent), 2);
        assert_eq!(both.counts().get("message: region # has # bytes"), Some(&4));
        assert_eq!(both.counts().get("refused, invalid usage"), Some(&4));
    }
}
