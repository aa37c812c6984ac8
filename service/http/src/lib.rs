//! HTTP/1.1 as a client that posts JSON: to etcd's gateway, and to collectors of metrics.
//!
//! Imports no other crate of ours. The most important: [`Connection`], one [`Request`] after the other with a time
//! for each; [`Endpoint`], the server's address; [`HttpError`], why there is no answer.

mod connection;
mod endpoint;

pub use self::connection::{Connection, HttpError, Request, Response};
pub use self::endpoint::Endpoint;
