//! `mccs-console`: the operator's page in the browser, and the JSON API behind it. Asks services over their sockets, and is none: what a
//! hostile browser breaks here, no job notices.
//!
//! Imports the control protocol and the configuration. [`server::Server`] takes connections, [`gate`] says which requests are let in,
//! [`routes::Route`] what they ask for, and [`desk::Desk`] asks the service, once for all browsers. The page itself is in `page/`, and is a
//! client of the API as any other.
//!
//! Invariants: nothing here changes a service but what the holder of a token has signed, which the service judges; nothing that a tenant chooses becomes markup; every connection, head, body and answer has a
//! bound and a time.

mod acts;
pub mod answer;
pub mod desk;
pub mod gate;
mod handler;
mod io;
pub mod openapi;
mod page;
pub mod routes;
pub mod server;
pub mod signature;
mod trace;
