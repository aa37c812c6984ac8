//! Tokens: who holds one may act where observers only look, within its rights, for its time, so many times.
//!
//! They are in this process's memory alone, and end with it. Acts are judged by a signature over their text: the secret does not come here
//! again, and whoever hands an act on can neither change nor repeat it. Pure, but for the random numbers of new tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mccs_control::ControlRequest;
use mccs_control::acts::{
    ActRefusal, NONCE_BYTES, Right, SignedAct, TokenAct, TokenMade, TokenState, TokenView, TokenWanted,
};
use mccs_ipc::hex;
use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};

/// Tokens that may act, at once.
const TOKENS_MAX: usize = 64;
/// Tokens that are remembered, with those that have ended: whoever holds one of the last is told why it does nothing any more.
const REMEMBERED_MAX: usize = 128;
/// How long a token may be good for, in seconds: a minute to a week.
const SECONDS: std::ops::RangeInclusive<u64> = 60..=7 * 24 * 3600;
/// Acts of a token. Nonces of those that were done are kept.
const ACTS: std::ops::RangeInclusive<u32> = 1..=10_000;
/// Characters of a name.
const NAME_CHARS_MAX: usize = 64;
/// Acts with wrong signatures that are told of within [`WRONG_WITHIN`].
const WRONG_MAX: u32 = 10;
/// See [`WRONG_MAX`].
const WRONG_WITHIN: Duration = Duration::from_secs(10);
/// Bytes of an id, and of a secret.
const ID_BYTES: usize = 8;
const SECRET_BYTES: usize = 32;

/// An act that may be done.
#[derive(Debug, PartialEq)]
pub(super) enum Judged {
    /// As this operator's request.
    Request {
        request: ControlRequest,
        /// The caller, for history.
        by: String,
    },
    /// Only its own token is asked for.
    View(TokenView),
}

/// See the module's documentation.
#[derive(Default)]
pub struct Tokens(Mutex<State>);

#[derive(Default)]
struct State {
    /// By id.
    tokens: BTreeMap<String, Token>,
    /// When the first wrong one came of those that are counted now, and how many have.
    wrong: Option<(Instant, u32)>,
}

struct Token {
    name: String,
    by: String,
    rights: BTreeSet<Right>,
    key: hmac::Key,
    ends_at: Instant,
    acts_left: u32,
    removed_at: Option<Instant>,
    /// Nonces of acts that were done.
    nonces: BTreeSet<[u8; NONCE_BYTES]>,
    refused: u64,
}

impl Token {
    fn state(&self, now: Instant) -> TokenState {
        if self.removed_at.is_some() {
            TokenState::Removed
        } else if now >= self.ends_at {
            TokenState::Expired
        } else if self.acts_left == 0 {
            TokenState::Spent
        } else {
            TokenState::Good
        }
    }

    fn view(&self, id: &str, now: Instant) -> TokenView {
        TokenView {
            id: id.to_owned(),
            name: self.name.clone(),
            by: self.by.clone(),
            rights: self.rights.iter().copied().collect(),
            state: self.state(now),
            seconds_left: self.ends_at.saturating_duration_since(now).as_secs(),
            acts_left: self.acts_left,
            refused: self.refused,
        }
    }

    /// Takes an act that is signed rightly.
    fn take(&mut self, signed: &SignedAct, nonce: [u8; NONCE_BYTES], now: Instant) -> Result<Judged, ActRefusal> {
        match self.state(now) {
            TokenState::Removed => return Err(ActRefusal::Removed),
            TokenState::Expired => return Err(ActRefusal::Expired),
            _ if self.nonces.contains(&nonce) => return Err(ActRefusal::Replayed),
            TokenState::Spent => return Err(ActRefusal::Spent),
            TokenState::Good => {}
        }
        let act: TokenAct =
            serde_json::from_str(&signed.body).map_err(|error| ActRefusal::Unreadable(error.to_string()))?;
        if let Some(right) = act.kind().right.filter(|right| !self.rights.contains(right)) {
            return Err(ActRefusal::NoRight(right));
        }
        let request = act.request().map_err(ActRefusal::Unreadable)?;
        self.nonces.insert(nonce);
        self.acts_left -= 1;
        Ok(match request {
            Some(request) => Judged::Request { request, by: format!("token {} of {}", self.name, self.by) },
            None => Judged::View(self.view(&signed.id, now)),
        })
    }
}

impl Tokens {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a token for `by`.
    ///
    /// # Errors
    /// Why not, for a person.
    pub(super) fn add(&self, wanted: TokenWanted, by: String, now: Instant) -> Result<TokenMade, String> {
        let TokenWanted { name, rights, seconds, acts } = wanted;
        check_name(&name)?;
        if rights.is_empty() {
            return Err("a token without rights does nothing: --rights".to_owned());
        }
        if !SECONDS.contains(&seconds) {
            return Err("a token is good for a minute at least, and for 168 hours at most: --for".to_owned());
        }
        if !ACTS.contains(&acts) {
            return Err(format!("a token does {} to {} acts: --acts", ACTS.start(), ACTS.end()));
        }
        let mut state = self.state();
        let good = state.tokens.values().filter(|token| token.state(now) == TokenState::Good).count();
        if good >= TOKENS_MAX {
            return Err(format!("there are {TOKENS_MAX} tokens already: take one back with mccsctl token remove"));
        }
        let (id, secret) = (random::<ID_BYTES>()?, random::<SECRET_BYTES>()?);
        state.make_room(now);
        let token = Token {
            name,
            by,
            rights: rights.into_iter().collect(),
            key: hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()),
            ends_at: now + Duration::from_secs(seconds),
            acts_left: acts,
            removed_at: None,
            nonces: BTreeSet::new(),
            refused: 0,
        };
        state.tokens.insert(id.clone(), token);
        Ok(TokenMade { token: format!("{id}.{secret}"), id })
    }

    /// Takes a token back. Returns its name, if it was there.
    pub(super) fn remove(&self, id: &str, now: Instant) -> Option<String> {
        let mut state = self.state();
        let token = state.tokens.get_mut(id).filter(|token| token.removed_at.is_none())?;
        token.removed_at = Some(now);
        token.nonces.clear();
        Some(token.name.clone())
    }

    /// All that are remembered.
    pub(super) fn views(&self, now: Instant) -> Vec<TokenView> {
        self.state().tokens.iter().map(|(id, token)| token.view(id, now)).collect()
    }

    /// Whether an act is to be done.
    ///
    /// # Errors
    /// Why not. Nothing of it is done then, and its nonce may come again.
    pub(super) fn judge(&self, signed: &SignedAct, now: Instant) -> Result<Judged, ActRefusal> {
        let nonce = hex::decode(&signed.nonce).ok_or_else(|| {
            ActRefusal::Unreadable(format!("a nonce has {} hexadecimal digits in lower case", 2 * NONCE_BYTES))
        })?;
        let mac: Option<[u8; 32]> = hex::decode(&signed.mac);
        let mut state = self.state();
        let text = signed.signed_text();
        // An id that there is not takes as long as one that there is: what this key says counts for nothing.
        let decoy = hmac::Key::new(hmac::HMAC_SHA256, &[0; SECRET_BYTES]);
        let key = state.tokens.get(&signed.id).map_or(&decoy, |token| &token.key);
        let is_right = hmac::verify(key, text.as_bytes(), &mac.unwrap_or_default()).is_ok();
        let Some(token) = state.tokens.get_mut(&signed.id).filter(|_| is_right && mac.is_some()) else {
            return Err(state.count_wrong(now));
        };
        let judged = token.take(signed, nonce, now);
        if let Err(refusal) = &judged {
            token.refused += 1;
            // Whoever has the secret is no stranger, and may fill the log no more than any operator.
            tracing::debug!(token = token.name, %refusal, "an act by token is refused");
        }
        judged
    }
}

impl State {
    /// Forgets the token that ended first, where as many are remembered as may be.
    fn make_room(&mut self, now: Instant) {
        if self.tokens.len() < REMEMBERED_MAX {
            return;
        }
        let ended = self.tokens.iter().filter(|(_, token)| token.state(now) != TokenState::Good);
        let first = ended.min_by_key(|(_, token)| token.removed_at.unwrap_or(token.ends_at)).map(|(id, _)| id.clone());
        if let Some(id) = first {
            self.tokens.remove(&id);
        }
    }

    fn count_wrong(&mut self, now: Instant) -> ActRefusal {
        let (since, count) = match self.wrong {
            Some((since, count)) if now < since + WRONG_WITHIN => (since, count + 1),
            _ => (now, 1),
        };
        self.wrong = Some((since, count));
        if count > WRONG_MAX {
            return ActRefusal::TooManyWrong;
        }
        tracing::warn!("an act by token is refused: no such token, or not what it has signed");
        ActRefusal::Wrong
    }
}

fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.@+".contains(c);
    let fits = !name.is_empty() && name.len() <= NAME_CHARS_MAX && name.chars().all(is_plain);
    let why = || format!("a token's name has 1 to {NAME_CHARS_MAX} letters, digits and -_.@+");
    if fits { Ok(()) } else { Err(why()) }
}

/// Random bytes, in hexadecimal digits.
fn random<const N: usize>() -> Result<String, String> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| "the kernel gives no random numbers".to_owned())?;
    Ok(hex::encode(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLLBACK: &str = "{\"act\":\"policy_rollback\"}";
    const HOUR: u64 = 3600;

    fn wanted(rights: &[Right], acts: u32) -> TokenWanted {
        TokenWanted { name: "on-call".into(), rights: rights.to_vec(), seconds: HOUR, acts }
    }

    fn made(tokens: &Tokens, rights: &[Right], acts: u32, now: Instant) -> TokenMade {
        tokens.add(wanted(rights, acts), "uid 0 (root)".into(), now).expect("a token")
    }

    /// Signs as a client does.
    fn sign(token: &TokenMade, nonce: u128, body: &str) -> SignedAct {
        let (id, secret) = token.token.split_once('.').expect("an id and a secret");
        let (id, nonce, body) = (id.to_owned(), format!("{nonce:032x}"), body.to_owned());
        let mut signed = SignedAct { id, nonce, mac: String::new(), body };
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        let mac = hmac::sign(&key, signed.signed_text().as_bytes());
        signed.mac = hex::encode(mac.as_ref());
        signed
    }

    #[test]
    fn a_signed_act_is_an_operators_request_once() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let token = made(&tokens, &[Right::Policy], 3, now);
        let signed = sign(&token, 1, ROLLBACK);
        let Ok(Judged::Request { request, by }) = tokens.judge(&signed, now) else { panic!("refused") };
        assert!(matches!(request, ControlRequest::Controller { .. }));
        assert_eq!(by, "token on-call of uid 0 (root)");
        assert_eq!(tokens.judge(&signed, now), Err(ActRefusal::Replayed));
        // A token tells of itself, which counts too.
        let Ok(Judged::View(view)) = tokens.judge(&sign(&token, 2, "{\"act\":\"token\"}"), now) else { panic!("none") };
        assert_eq!((view.acts_left, view.seconds_left, view.refused), (1, HOUR, 1));
        assert!(tokens.judge(&sign(&token, 3, ROLLBACK), now).is_ok());
        assert_eq!(tokens.judge(&sign(&token, 4, ROLLBACK), now), Err(ActRefusal::Spent));
        assert_eq!(tokens.judge(&signed, now), Err(ActRefusal::Replayed), "also once it is spent");
    }

    #[test]
    fn what_is_changed_on_its_way_is_wrong_as_is_what_nobody_has_signed() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let token = made(&tokens, &[Right::Policy, Right::Host], 9, now);
        let signed = || sign(&token, 1, ROLLBACK);
        let other = made(&tokens, &[Right::Policy], 9, now);
        let mut zero = SignedAct { id: "00".repeat(ID_BYTES), ..signed() };
        let decoy = hmac::Key::new(hmac::HMAC_SHA256, &[0; SECRET_BYTES]);
        let mac = hmac::sign(&decoy, zero.signed_text().as_bytes());
        zero.mac = hex::encode(mac.as_ref());
        for (what, wrong) in [
            ("another act", SignedAct { body: "{\"act\":\"undrain\"}".into(), ..signed() }),
            ("another nonce", SignedAct { nonce: format!("{:032x}", 2), ..signed() }),
            ("another token", SignedAct { id: other.id.clone(), ..signed() }),
            ("another signature", SignedAct { mac: "0".repeat(64), ..signed() }),
            ("none", SignedAct { mac: String::new(), ..signed() }),
            ("no digits", SignedAct { mac: "é".repeat(32), ..signed() }),
            ("no such token", zero),
        ] {
            assert_eq!(tokens.judge(&wrong, now), Err(ActRefusal::Wrong), "{what}");
        }
        for nonce in ["", "1", &"G".repeat(32), &"A".repeat(32), &"0".repeat(33)] {
            let refused = tokens.judge(&SignedAct { nonce: nonce.to_owned(), ..signed() }, now);
            assert!(matches!(refused, Err(ActRefusal::Unreadable(_))), "{nonce}");
        }
        assert!(tokens.judge(&signed(), now).is_ok(), "nothing of it was spent");
    }

    #[test]
    fn wrong_ones_are_told_of_at_a_rate_and_keep_no_right_one_out() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let token = made(&tokens, &[Right::Policy], 9, now);
        let wrong = SignedAct { mac: "0".repeat(64), ..sign(&token, 1, ROLLBACK) };
        for _ in 0..WRONG_MAX {
            assert_eq!(tokens.judge(&wrong, now), Err(ActRefusal::Wrong));
        }
        assert_eq!(tokens.judge(&wrong, now), Err(ActRefusal::TooManyWrong));
        assert!(tokens.judge(&sign(&token, 1, ROLLBACK), now).is_ok());
        assert_eq!(tokens.judge(&wrong, now + WRONG_WITHIN), Err(ActRefusal::Wrong));
    }

    #[test]
    fn a_token_ends_with_its_time_or_its_removal() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let [expires, removed] = [(); 2].map(|()| made(&tokens, &[Right::Policy], 9, now));
        let later = now + Duration::from_secs(HOUR);
        let just = later - Duration::from_nanos(1);
        assert!(tokens.judge(&sign(&expires, 1, ROLLBACK), just).is_ok());
        assert_eq!(tokens.judge(&sign(&expires, 2, ROLLBACK), later), Err(ActRefusal::Expired));
        assert_eq!(tokens.remove(&removed.id, now).as_deref(), Some("on-call"));
        assert_eq!(tokens.remove(&removed.id, now), None);
        assert_eq!(tokens.judge(&sign(&removed, 1, ROLLBACK), now), Err(ActRefusal::Removed));
        let states: BTreeSet<_> = tokens.views(later).iter().map(|view| format!("{:?}", view.state)).collect();
        assert_eq!(states, BTreeSet::from(["Expired".to_owned(), "Removed".to_owned()]));
    }

    #[test]
    fn rights_bound_acts_and_what_is_none_costs_nothing() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let token = made(&tokens, &[Right::Host], 1, now);
        assert_eq!(tokens.judge(&sign(&token, 1, ROLLBACK), now), Err(ActRefusal::NoRight(Right::Policy)));
        for body in
            ["", "{}", "[]", "{\"act\":\"upgrade\"}", "{\"act\":\"undrain\",\"x\":1}", "{\"act\":\"undrain\"} x"]
        {
            let refused = tokens.judge(&sign(&token, 1, body), now);
            assert!(matches!(refused, Err(ActRefusal::Unreadable(_))), "{body}: {refused:?}");
        }
        assert!(tokens.judge(&sign(&token, 1, "{\"act\":\"undrain\"}"), now).is_ok());
    }

    #[test]
    fn tokens_have_bounds() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let add = |wanted: TokenWanted| tokens.add(wanted, "uid 0".into(), now);
        let base = || wanted(&[Right::Policy], 1);
        for (wrong, why) in [
            (TokenWanted { name: "a\nb".into(), ..base() }, "name"),
            (TokenWanted { name: String::new(), ..base() }, "name"),
            (TokenWanted { name: "x".repeat(65), ..base() }, "name"),
            (TokenWanted { rights: Vec::new(), ..base() }, "rights"),
            (TokenWanted { seconds: 59, ..base() }, "minute"),
            (TokenWanted { seconds: u64::MAX, ..base() }, "168"),
            (TokenWanted { acts: 0, ..base() }, "acts"),
            (TokenWanted { acts: u32::MAX, ..base() }, "acts"),
        ] {
            let refused = add(wrong).expect_err(why);
            assert!(refused.contains(why), "{refused}");
        }
        let all: Vec<_> = (0..TOKENS_MAX).map(|_| add(base()).expect("room")).collect();
        assert!(add(base()).expect_err("no room").contains("64 tokens"));
        // Those that have ended leave room, and are forgotten in the end.
        for token in &all {
            tokens.remove(&token.id, now);
        }
        for _ in 0..3 {
            for _ in 0..TOKENS_MAX {
                let token = add(base()).expect("room");
                tokens.remove(&token.id, now);
            }
        }
        assert_eq!(tokens.views(now).len(), REMEMBERED_MAX);
        assert!(!format!("{:?}", all[0]).contains(&all[0].token), "a secret is not written");
    }
}
