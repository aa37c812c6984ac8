//! A rank of several hosts' GPUs dies, or aborts: all others hear of it.

use std::path::PathBuf;

use mccs_tests::hosts::TestHosts;

use super::{everything, four_processes};
use crate::ranks::FORKS;
use crate::until_it_fails::{ABORTS, all_are_told, others_hear_of_a_kill};
use crate::wait_until;

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_a_rank_that_is_killed_among_rails() {
    hear_of_a_killed_rank(&[]);
    hear_of_a_killed_rank(&[(FORKS, "1".into())]);
}

fn hear_of_a_killed_rank(environment: &[(&str, PathBuf)]) {
    let hosts = TestHosts::start(2, &everything());
    others_hear_of_a_kill(four_processes(&hosts, environment));
    for host in [0, 1] {
        wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_an_abort_among_rails() {
    hear_of_an_abort(&[(ABORTS, "1".into())]);
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_an_abort_among_segments_in_streams_of_their_own() {
    hear_of_an_abort(&[(ABORTS, "1".into()), (FORKS, "1".into())]);
}

fn hear_of_an_abort(environment: &[(&str, PathBuf)]) {
    let hosts = TestHosts::start(2, &everything());
    all_are_told(four_processes(&hosts, environment), "aborted");
    for host in [0, 1] {
        wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}
