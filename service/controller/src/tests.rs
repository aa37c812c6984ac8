//! A controller, agents and hosts that do what orders say, in one thread on a clock of the test's.

mod by_hand;
mod dead;
mod fixture;
mod guide;
mod inventory;
mod nics;
mod paces;
mod properties;
mod rules;
mod story;
mod transport;
mod trouble;
