//! Messages between controller and agents, and between controller and operators. Plain data, and
//! the controller's outputs in order.

pub mod answer;
pub mod message;
pub mod outbox;
