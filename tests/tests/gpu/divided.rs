//! Two services that have half of a host's GPUs each. Needs two GPUs.

use mccs_cuda::gpus;
use mccs_tests::hosts::TestHosts;

use super::TENANTS;
use super::join_with_gpu;
use super::staged::play_halves;

#[test]
#[ignore = "needs two GPUs"]
fn services_with_half_of_the_gpus_each_refuse_the_others_ranks_and_work_together() {
    let all: Vec<_> = gpus().expect("GPUs").iter().take(8).map(|gpu| gpu.id).collect();
    assert!(all.len() > 1, "needs two GPUs");
    let halves = all.split_at(all.len() / 2);
    let halves = [halves.0, halves.1];
    let settings = |host: usize| {
        let names: Vec<_> = halves[host].iter().map(ToString::to_string).collect();
        TENANTS.replacen("[cuda]\n", &format!("[cuda]\ngpus = {names:?}\n"), 1)
    };
    let hosts = TestHosts::start_each(2, settings);
    for host in [0, 1] {
        let answer = join_with_gpu(hosts.service(host), halves[1 - host][0].0);
        assert!(answer.contains("does not have the GPU"), "{answer}");
    }
    play_halves("checks", &hosts);
}
