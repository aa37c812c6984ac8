//! A controller, agents and hosts that do what orders say, in one thread on a clock of the test's.

mod bed;
mod by_hand;
mod dead;
mod equipment;
mod guide;
mod nics;
mod paces;
mod properties;
mod rules;
mod story;
mod transport;
mod trouble;
