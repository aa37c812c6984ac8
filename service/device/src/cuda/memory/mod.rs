//! GPU memory: what the service makes for ranks to meet in, and what it opens of theirs.

pub(crate) mod deferred_free;
pub(crate) mod handles;
pub(crate) mod imports;
pub(crate) mod resource_pool;
pub(crate) mod segments;
pub(crate) mod slots;
pub(crate) mod symmetric_buffer;
pub(crate) mod twin;
