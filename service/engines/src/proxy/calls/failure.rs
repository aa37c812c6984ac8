//! Failure of a communicator: the first reason, told to all its ranks.

use std::sync::Arc;

use mccs_ipc::types::ErrorClass;

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub(crate) class: ErrorClass,
    pub(crate) message: Arc<str>,
}

impl Failure {
    pub(crate) fn new(class: ErrorClass, message: impl Into<Arc<str>>) -> Self {
        Failure { class, message: message.into() }
    }
}
