#!/bin/sh
# Takes all figures about several hosts, in order, within 12 minutes on two cores. It runs as
# root, on a machine that does nothing else. Writes eval/results/hosts-*.{json,md}. A figure that
# misses its goal does not keep the others from being taken.
cd "$(dirname "$0")/.." || exit 1
missed=""
figure() {
    echo "== $* (at $(($(date +%s) - began)) s)"
    "$@" || missed="$missed $3"
}
began=$(date +%s)

# As fast as the kernel moves packets, beside Gloo.
figure eval/hosts.py eval/fabric/rack.toml hosts-rack --rounds 5
# The CPU is not the limit: bandwidth beside iperf3's.
figure eval/hosts.py eval/fabric/rack-shaped.toml hosts-shaped --rounds 3 --iterations 3 --warmup 1 --sides mccs,gloo
# A small call, beside a bare ping-pong.
figure eval/latency.py eval/fabric/pair.toml hosts-latency --rounds 9
# Several ranks a host: each host as one, beside a ring of ranks.
figure eval/hosts.py eval/fabric/rack-shaped.toml hosts-hierarchy --ranks-per-host 2 --algorithms host_ring,ring --sides mccs \
    --rounds 5 --iterations 3 --warmup 1
# Strategies that change all the time.
figure eval/changes.py eval/fabric/pair.toml changes
# Many ranks.
figure eval/setup_time.py eval/fabric/rack.toml hosts-setup

echo "== all took $(($(date +%s) - began)) s"
[ -z "$missed" ] || { echo "failed, or missed its goal:$missed"; exit 1; }
