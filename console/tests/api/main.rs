//! The console as a program, beside real services with real jobs: what it serves, to whom, and what it refuses.

mod acts;
mod bad_input;
mod documents;
mod fixture;
mod patience;
mod slow;
