//! Tests of the whole engine, and the engine that tests of its components use.

pub(super) mod at_once;
mod gpus;
