//! Why a session of another program cannot go on, and who could mend it.

/// Why a session cannot go on.
#[derive(Debug)]
pub enum NotResumed {
    /// The configuration has no room for it: the operator may mend that.
    Configuration(String),
    /// The handed-over state of it: nobody can.
    Session(String),
}

impl NotResumed {
    pub(super) fn configuration(why: impl ToString) -> Self {
        NotResumed::Configuration(why.to_string())
    }

    pub(super) fn session(why: impl ToString) -> Self {
        NotResumed::Session(why.to_string())
    }
}
