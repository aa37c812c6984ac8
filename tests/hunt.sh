#!/bin/sh
# Hunts with many services side by side, each with seeded attackers and a checked victim, and sums up what they have seen.
#
#   tests/hunt.sh BINARY [PROCESSES [SECONDS [FOLDER]]]
#
# BINARY is the test program `hostile`, built before: cargo test --release -p mccs-tests --test hostile --no-run
# Each process has a service in a folder of its own, and seeds of its own. A failure names the log with its seed.
set -eu
binary=${1:?usage: tests/hunt.sh BINARY [PROCESSES [SECONDS [FOLDER]]]}
processes=${2:-$(( ($(nproc) + 1) / 2 ))}
seconds=${3:-3600}
folder=${4:-hunt}
mkdir -p "$folder"
rm -f "$folder"/*.log

number=0
pids=
while [ "$number" -lt "$processes" ]; do
    # Nobody gets through as many seeds in a day.
    MCCS_SECONDS="$seconds" MCCS_FIRST_SEED=$((number * 1000000000)) \
        "$binary" whatever_tenants_do --nocapture > "$folder/$number.log" 2>&1 &
    pids="$pids $!"
    number=$((number + 1))
done
failed=0
number=0
for pid in $pids; do
    wait "$pid" || { failed=$((failed + 1)); echo "process $number failed; see $folder/$number.log" >&2; }
    number=$((number + 1))
done

awk -v processes="$processes" -v failed="$failed" '
    /^hunt: / {
        for (at = 2; at <= NF; at++) { split($at, pair, "="); value[pair[1]] = pair[2] + 0 }
        sequences += value["sequences"]; steps += value["steps"]; calls += value["checked_calls"]
        if (value["seconds"] > seconds) seconds = value["seconds"]
        if (value["longest_call_ms"] > longest) longest = value["longest_call_ms"]
        if (value["grown_kib"] > grown) grown = value["grown_kib"]
        if (value["held_kib"] > held) held = value["held_kib"]
        quotas = value["quotas_kib"]
    }
    END {
        printf "{\"processes\": %d, \"failed\": %d, \"seconds\": %d, \"sequences\": %d, \"steps\": %d, ", \
            processes, failed, seconds, sequences, steps
        printf "\"checked_calls\": %d, \"longest_call_ms\": %d, \"most_grown_kib\": %d, ", calls, longest, grown
        printf "\"most_held_kib\": %d, \"quotas_kib\": %d}\n", held, quotas
    }' "$folder"/*.log | tee "$folder/hunt.json"
[ "$failed" -eq 0 ]
