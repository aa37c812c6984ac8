//! Acts by token: what the holder of a token may have a service do, how it signs that, and why it is refused.
//!
//! The secret never travels: a signature is the HMAC of the act and of a nonce that is used once. One table, [`ACTS`], says which right each
//! act needs; the console's description of its API is made of it.

use std::fmt;
use std::str::FromStr;

use mccs_config::change::StrategyChange;
use mccs_config::service::TenantConfig;
use mccs_controller::links::LinkState;
use mccs_controller::messages::answer::ControllerRequest;
use serde::{Deserialize, Serialize};

use crate::ControlRequest;

/// Longest body of an act: it has room in a request, though each quote in it takes two more bytes there.
pub const ACT_BYTES_MAX: usize = 160 << 10;
/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 16;
/// First line of a signature's text: the version of this scheme.
const SCHEME: &str = "mccs-act-1";

/// Rights of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Right {
    /// Policy and links of the cluster.
    Policy,
    /// Tenants of this host.
    Tenants,
    /// Strategies of communicators.
    Communicators,
    /// Whether this host takes new processes.
    Host,
}

impl Right {
    /// All that there are.
    pub const ALL: [Right; 4] = [Right::Policy, Right::Tenants, Right::Communicators, Right::Host];

    /// As operators write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Right::Policy => "policy",
            Right::Tenants => "tenants",
            Right::Communicators => "communicators",
            Right::Host => "host",
        }
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Right {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Right::ALL.map(Right::name).join(", ");
        let found = Right::ALL.into_iter().find(|right| right.name() == text);
        found.ok_or_else(|| format!("there is no such right: a token may have {}", names()))
    }
}

/// An act, as its JSON says it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "act", rename_all = "snake_case", deny_unknown_fields)]
pub enum TokenAct {
    /// Tell what the token may.
    Token {},
    /// As [`ControllerRequest::Apply`].
    PolicyApply {
        /// The policy file's text.
        text: String,
    },
    /// As [`ControllerRequest::Rollback`].
    PolicyRollback {},
    /// As [`ControllerRequest::Link`].
    Link {
        /// Leaf, or host.
        lower: String,
        /// Spine, or leaf.
        upper: String,
        /// How it is.
        state: LinkState,
    },
    /// As [`ControlRequest::AddTenant`].
    TenantAdd {
        /// Keys as in `[[tenant]]`.
        tenant: Box<TenantConfig>,
    },
    /// As [`ControlRequest::RemoveTenant`].
    TenantRemove {
        /// Which.
        name: String,
    },
    /// As [`ControlRequest::Drain`].
    Drain {
        /// Why.
        #[serde(default)]
        reason: Option<String>,
    },
    /// Let new processes in again.
    Undrain {},
    /// As [`ControlRequest::Reconfigure`].
    Reconfigure {
        /// Its number.
        communicator: u64,
        /// The text of a `change.toml`.
        change: String,
        /// Collectives that may start while hosts agree.
        #[serde(default)]
        window: Option<u32>,
    },
    /// As [`ControlRequest::Unpin`].
    Unpin {
        /// Its number.
        communicator: u64,
    },
}

/// A row of [`ACTS`].
#[derive(Debug)]
pub struct ActKind {
    /// Its name in JSON.
    pub act: &'static str,
    /// The right that it needs; any token will do, if `None`.
    pub right: Option<Right>,
    /// Its work.
    pub summary: &'static str,
    /// Its keys besides: name, JSON's type, meaning. One that may be absent says so.
    pub keys: &'static [(&'static str, &'static str, &'static str)],
}

/// All acts.
pub static ACTS: [ActKind; 10] = [
    ActKind { act: "token", right: None, summary: "tells name, rights and end of the token", keys: &[] },
    ActKind {
        act: "policy_apply",
        right: Some(Right::Policy),
        summary: "mccsctl policy apply",
        keys: &[("text", "string", "The policy file's text.")],
    },
    ActKind { act: "policy_rollback", right: Some(Right::Policy), summary: "mccsctl policy rollback", keys: &[] },
    ActKind {
        act: "link",
        right: Some(Right::Policy),
        summary: "mccsctl link",
        keys: &[
            ("lower", "string", "Leaf, or host."),
            ("upper", "string", "Spine, or leaf."),
            ("state", "any", "\"up\", \"down\", or {\"rate\": \"25Gbit/s\"}."),
        ],
    },
    ActKind {
        act: "tenant_add",
        right: Some(Right::Tenants),
        summary: "mccsctl tenant add",
        keys: &[("tenant", "object", "Keys as in [[tenant]] of service.toml, without socket.")],
    },
    ActKind {
        act: "tenant_remove",
        right: Some(Right::Tenants),
        summary: "mccsctl tenant remove; answers before its sessions have ended",
        keys: &[("name", "string", "Which.")],
    },
    ActKind {
        act: "drain",
        right: Some(Right::Host),
        summary: "mccsctl drain",
        keys: &[("reason", "string", "Why; may be absent.")],
    },
    ActKind { act: "undrain", right: Some(Right::Host), summary: "mccsctl drain --undo", keys: &[] },
    ActKind {
        act: "reconfigure",
        right: Some(Right::Communicators),
        summary: "mccsctl reconfigure",
        keys: &[
            ("communicator", "integer", "Its number."),
            ("change", "string", "Text of a change.toml."),
            ("window", "integer", "Collectives that may start meanwhile; may be absent."),
        ],
    },
    ActKind {
        act: "unpin",
        right: Some(Right::Communicators),
        summary: "mccsctl reconfigure --unpin",
        keys: &[("communicator", "integer", "Its number.")],
    },
];

impl TokenAct {
    fn name(&self) -> &'static str {
        match self {
            TokenAct::Token {} => "token",
            TokenAct::PolicyApply { .. } => "policy_apply",
            TokenAct::PolicyRollback {} => "policy_rollback",
            TokenAct::Link { .. } => "link",
            TokenAct::TenantAdd { .. } => "tenant_add",
            TokenAct::TenantRemove { .. } => "tenant_remove",
            TokenAct::Drain { .. } => "drain",
            TokenAct::Undrain {} => "undrain",
            TokenAct::Reconfigure { .. } => "reconfigure",
            TokenAct::Unpin { .. } => "unpin",
        }
    }

    /// Its row of the table.
    #[must_use]
    pub fn kind(&self) -> &'static ActKind {
        let own = ACTS.iter().find(|kind| kind.act == self.name());
        own.expect("invariant: the table has a row for each act, which a test compares")
    }

    /// The operator's request for an act; nothing for [`TokenAct::Token`].
    ///
    /// # Errors
    /// The mistake in its texts.
    pub fn request(self) -> Result<Option<ControlRequest>, String> {
        let controller = |request| ControlRequest::Controller { request };
        Ok(Some(match self {
            TokenAct::Token {} => return Ok(None),
            TokenAct::PolicyApply { text } => {
                controller(ControllerRequest::Apply { name: "the policy".to_owned(), text })
            }
            TokenAct::PolicyRollback {} => controller(ControllerRequest::Rollback),
            TokenAct::Link { lower, upper, state } => controller(ControllerRequest::Link { lower, upper, state }),
            TokenAct::TenantAdd { tenant } => ControlRequest::AddTenant { tenant },
            TokenAct::TenantRemove { name } => ControlRequest::RemoveTenant { name },
            TokenAct::Drain { reason } => ControlRequest::Drain { drains: Some(true), reason },
            TokenAct::Undrain {} => ControlRequest::Drain { drains: Some(false), reason: None },
            TokenAct::Reconfigure { communicator, change, window } => {
                let change = StrategyChange::parse(&change, "the change").map_err(|error| error.to_string())?;
                if change.is_empty() {
                    return Err("the change says nothing to change".to_owned());
                }
                ControlRequest::Reconfigure { communicator, change, window }
            }
            TokenAct::Unpin { communicator } => ControlRequest::Unpin { communicator },
        }))
    }
}

/// An act with its signature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignedAct {
    /// The token's.
    pub id: String,
    /// 32 hexadecimal digits that this token has not signed with.
    pub nonce: String,
    /// HMAC-SHA-256 of [`SignedAct::signed_text`] under the token's secret, in hexadecimal digits.
    pub mac: String,
    /// The act's JSON, as it was signed.
    pub body: String,
}

impl SignedAct {
    /// The text that is signed.
    #[must_use]
    pub fn signed_text(&self) -> String {
        format!("{SCHEME}\n{}\n{}\n{}", self.id, self.nonce, self.body)
    }
}

/// Why an act is not even begun. None of them says whether there is a token with an id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ActRefusal {
    /// No such token, or another secret, or another text than the signed one.
    #[error(
        "this is no token of this service, or not what it has signed; tokens end with the service: mccsctl token add"
    )]
    Wrong,
    /// As the one before, more often than it is told of.
    #[error("too many acts with wrong tokens came in a short time; a right one is not kept out")]
    TooManyWrong,
    /// Its time is over.
    #[error("the token has expired: mccsctl token add")]
    Expired,
    /// An operator has taken it back.
    #[error("the token was removed: mccsctl token add")]
    Removed,
    /// It has done as many acts as it may.
    #[error("the token has done all acts that it may: mccsctl token add")]
    Spent,
    /// This very act came before.
    #[error("this act was already taken: sign each with a nonce of its own")]
    Replayed,
    /// The act needs more.
    #[error("the token has no right {0}: mccsctl token add --rights {0}")]
    NoRight(Right),
    /// It cannot be understood.
    #[error("the act cannot be read: {0}")]
    Unreadable(String),
}

impl ActRefusal {
    /// For programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            ActRefusal::Wrong => "wrong_token",
            ActRefusal::TooManyWrong => "too_many_wrong",
            ActRefusal::Expired => "expired",
            ActRefusal::Removed => "removed",
            ActRefusal::Spent => "spent",
            ActRefusal::Replayed => "replayed",
            ActRefusal::NoRight(_) => "no_right",
            ActRefusal::Unreadable(_) => "bad_act",
        }
    }
}

/// An operator's wishes for a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenWanted {
    /// Its owner, for history.
    pub name: String,
    /// Its rights.
    pub rights: Vec<Right>,
    /// For how long, in seconds.
    pub seconds: u64,
    /// How many acts.
    pub acts: u32,
}

/// A token that was made.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenMade {
    /// Its id, by which it is removed.
    pub id: String,
    /// Id and secret, joined by a dot. The service tells it this once.
    pub token: String,
}

impl fmt::Debug for TokenMade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenMade").field("id", &self.id).finish_non_exhaustive()
    }
}

/// How a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenState {
    /// It may act.
    Good,
    /// Its time is over.
    Expired,
    /// It has done all it may.
    Spent,
    /// It was taken back.
    Removed,
}

/// A token, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenView {
    /// Its id.
    pub id: String,
    /// Its owner.
    pub name: String,
    /// Its maker.
    pub by: String,
    /// Its rights.
    pub rights: Vec<Right>,
    /// How it is.
    pub state: TokenState,
    /// Until it expires.
    pub seconds_left: u64,
    /// Acts that it may still do.
    pub acts_left: u32,
    /// Acts of it that were refused.
    pub refused: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An act of each row, of its keys.
    fn example(kind: &ActKind) -> String {
        let value = |key: &str, of: &str| match (key, of) {
            ("state", _) => "\"down\"".to_owned(),
            ("change", _) => "\"channels = 2\"".to_owned(),
            ("tenant", _) => "{\"name\":\"t\"}".to_owned(),
            (_, "integer") => "7".to_owned(),
            _ => "\"x\"".to_owned(),
        };
        let keys = kind.keys.iter().map(|(key, of, _)| format!(",\"{key}\":{}", value(key, of)));
        format!("{{\"act\":\"{}\"{}}}", kind.act, keys.collect::<String>())
    }

    #[test]
    fn the_table_has_each_act_with_all_its_keys() {
        let unknown = serde_json::from_str::<TokenAct>("{\"act\":\"?\"}").unwrap_err().to_string();
        let (_, expected) = unknown.split_once("expected one of ").expect("serde names them");
        let names: Vec<_> = expected.split('`').skip(1).step_by(2).collect();
        assert_eq!(names, ACTS.each_ref().map(|kind| kind.act));
        for kind in &ACTS {
            let text = example(kind);
            let act: TokenAct = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(act.kind().act, kind.act);
            let keys = serde_json::to_value(&act).unwrap().as_object().expect("an object").len();
            assert_eq!(keys, 1 + kind.keys.len(), "{text}");
            let request = act.request().unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(request.is_none(), kind.right.is_none(), "{text}");
            assert!(request.is_none_or(|request| !request.only_looks()), "{text}");
            let more = text.replacen('{', "{\"more\":1,", 1);
            assert!(serde_json::from_str::<TokenAct>(&more).is_err(), "{more}");
        }
    }

    #[test]
    fn a_change_that_cannot_be_is_no_request() {
        let refused = |change: &str| {
            TokenAct::Reconfigure { communicator: 1, change: change.to_owned(), window: None }.request().unwrap_err()
        };
        assert!(refused("").contains("nothing to change"));
        assert!(refused("channels = 0").contains("channels"));
        assert!(refused("ring = 1").contains("ring"));
    }

    #[test]
    fn rights_are_read_as_they_are_written() {
        for right in Right::ALL {
            assert_eq!(right.name().parse(), Ok(right));
            assert_eq!(serde_json::to_string(&right).unwrap(), format!("\"{right}\""));
        }
        assert!("all".parse::<Right>().unwrap_err().contains("policy, tenants, communicators, host"));
    }
}
