//! The launcher as its users meet it: the executable, with scripts as service and ranks.

mod end;
mod hosts;
mod quickstart;
mod real;
mod run;
mod support;
