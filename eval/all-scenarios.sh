#!/bin/sh
# Runs every scenario that is measured on an emulated fabric, with the parameters of the committed
# results. It runs as root, on a machine that does nothing else. Not fault and qos-jitter: what
# fails and varies there the fabric does not do. Writes eval/results/fabric-*.{json,md}. One that
# misses its goal does not keep the others from being run.
cd "$(dirname "$0")/.." || exit 1
missed=""
measure() {
    name=$1
    shift
    echo "== $name $* (at $(($(date +%s) - began)) s)"
    eval/scenario.py "eval/scenarios/$name.toml" "$@" || missed="$missed $name"
}
# Every flow has a queue of its own, and on links of a fifth of the rates.
fair() { measure "$@" --fabric eval/fabric/testbed-fair.toml --suffix fair; }
slow() { measure "$@" --fabric eval/fabric/testbed-slow.toml --suffix slow; }
began=$(date +%s)

# One job: what rings and flow assignment are worth, also by length.
measure single --more 3 --rounds 5
measure single --lengths --rounds 2 --settle 1s
measure single --lengths 0.00006103515625 0.0009765625 0.00390625 0.015625 --more 0.25 --rounds 2 --settle 1s --suffix small --no-goal
fair single --more 3 --rounds 3
measure single-gather --job eight --more 3 --rounds 3 --suffix eight
measure single-gather --job four --more 3 --rounds 3 --suffix four
# Several jobs.
for setup in setup1 setup2 setup3 setup4; do
    measure "$setup" --longer 4 --more 2 --rounds 3
    fair "$setup" --longer 4 --more 2 --rounds 3 --variant "bad ring" --variant "good ring" --variant "good ring, flows assigned"
    slow "$setup" --longer 10 --more 2 --rounds 3
done
# The operator's means: priorities, turns, shares, caps, and changes by hand.
measure qos --alone --rounds 3 --more 0.3 --variant FFA --fabric eval/fabric/nics-fair.toml --suffix fair
measure qos --rounds 3
measure qos --rounds 3 --more 0.6 --fabric eval/fabric/nics-fair.toml --suffix fair --variant ECMP --variant FFA --variant PFA \
    --variant "ours, paced"
measure qos-second --longer 2 --rounds 3
measure turns --longer 4 --rounds 2
measure turns --longer 4 --rounds 2 --fabric eval/fabric/nics-fair.toml --suffix fair
measure shares --longer 5 --rounds 3
measure caps --longer 5 --rounds 3
measure host-caps
measure detour --longer 2 --settle 1s --rounds 3
fair detour --settle 1s

echo "== all took $(($(date +%s) - began)) s"
[ -z "$missed" ] || { echo "failed, or missed its goal:$missed"; exit 1; }
