#!/bin/bash
# Everything that needs a GPU: fails where there is none. Runs what cargo builds, or what is in the folder MCCS_BIN, so
# that binaries built elsewhere can be carried to a machine with GPUs and without Rust: there the tests of
# `cargo test --no-run --release -p mccs-tests --test gpu` are called gpu-tests.
#
#   tests/gpu.sh [checks|figures|all]      default: checks
#
# MCCS_NCCL names NCCL's library, for figures beside it. Results go to the folder OUT, if it is set.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-checks}
nvidia-smi -L >/dev/null 2>&1 || { echo "tests/gpu.sh: there is no GPU here (nvidia-smi -L)" >&2; exit 1; }
gpus=$(nvidia-smi -L | grep -c '^GPU')
if [ -z "${MCCS_BIN:-}" ]; then
    cargo build --release --quiet -p mccs-service -p mccs-eval -p mccs-nccl
    cargo test --release --quiet --no-run -p mccs-tests --test gpu
    MCCS_BIN=$PWD/target/release
    ln -sf libnccl.so "$MCCS_BIN/libnccl.so.2"
    gpu_tests=$(ls -t target/release/deps/gpu-* | grep -v '\.d$' | head -1)
fi
work=$(mktemp -d)
service=
finish() {
    for process in $service ${more:-}; do kill "$process" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

cat > "$work/service.toml" <<TOML
[service]
name = "gpu-host"
runtime_dir = "$work/run"
[limits]
operation_timeout = "60s"
[cuda]
use = "required"
[[tenant]]
name = "tests"
TOML
# Starts the service called $1, whose configuration is there; its process is in `started`.
start() {
    "$MCCS_BIN/mccs-service" --config "$work/$1.toml" > "$work/$1.ready" 2> >(tee "$work/$1.log" >&2) &
    started=$!
    until grep -q ready "$work/$1.ready"; do
        kill -0 "$started" 2>/dev/null || { echo "tests/gpu.sh: the service $1 did not start" >&2; exit 1; }
        sleep 0.1
    done
}
start service
service=$started
export MCCS_SOCKET=$work/run/mccs.sock
nvidia-smi -L | sed 's/ (UUID.*//'
perf=$MCCS_BIN/mccs-cuda-perf

# Two services on this machine, joined by TCP, and one that carries everything out itself: their sockets in `two` and `strict`.
more=
start_more() {
    "$MCCS_BIN/mccsctl" keys --hosts h0,h1 --dir "$work/keys" >/dev/null
    for host in 0 1; do
        cat > "$work/h$host.toml" <<TOML
[service]
name = "h$host"
runtime_dir = "$work/h$host"
[cuda]
use = "required"
[exchange]
listen = "127.0.0.$((host + 2)):7400"
certificate = "$work/keys/h$host.crt"
key = "$work/keys/h$host.key"
authority = "$work/keys/authority.crt"
[[host]]
name = "h0"
address = "127.0.0.2:7400"
[[host]]
name = "h1"
address = "127.0.0.3:7400"
TOML
        start "h$host"
        more+=" $started"
    done
    sed "s|$work/run|$work/strict|; s|use = \"required\"|use = \"required\"\nexecution = \"service\"|" "$work/service.toml" > "$work/strict.toml"
    start strict
    more+=" $started"
    two=$work/h0/mccs.sock,$work/h1/mccs.sock
    strict=$work/strict/mccs.sock
}

# Through services: every collective, element type and reduction; PyTorch.
staged_checks() {
    start_more
    for sockets in "$two" "$strict"; do
        for nranks in 2 $([ "$gpus" -le 2 ] || echo "$gpus"); do
            echo "== through $(tr , ' ' <<< "$sockets" | wc -w) services, $nranks ranks"
            "$perf" --check --socket "$sockets" --nranks "$nranks" --operation all --begin 1B --end 48KiB --factor 37
            "$perf" --check --socket "$sockets" --nranks "$nranks" --operation all --begin 1MiB --end 9MiB --factor 3 --dtypes float,bfloat16 --redops sum,premulsum
        done
    done
    if [ "$gpus" -gt 1 ] && python3 -c 'import torch' 2>/dev/null; then
        LD_PRELOAD=$MCCS_BIN/libnccl.so.2 python3 tests/pytorch.py "$gpus" ${two/,/ }
        LD_PRELOAD=$MCCS_BIN/libnccl.so.2 MCCS_STAGED=1 python3 tests/pytorch.py "$gpus" "$strict"
    fi
}

checks() {
    for nranks in 1 $(seq 2 "$gpus"); do
        echo "== every collective, $nranks ranks"
        "$perf" --check --nranks "$nranks" --operation all --begin 1B --end 48KiB --factor 37
        "$perf" --check --nranks "$nranks" --operation all --begin 1MiB --end 3MiB --factor 3 --dtypes float,bfloat16 --redops sum,premulsum
    done
    echo "== graphs, streams, tenants, failures"
    # One at a time: they look at the GPUs' free memory.
    "${gpu_tests:-$MCCS_BIN/gpu-tests}" --ignored --test-threads 1
    echo "== PyTorch, unchanged"
    if python3 -c 'import torch' 2>/dev/null; then
        LD_PRELOAD=$MCCS_BIN/libnccl.so.2 python3 tests/pytorch.py "$gpus"
    else
        echo "there is no PyTorch here: not run"
    fi
    staged_checks
    if [ "$gpus" = 1 ]; then
        # Time slices of two milliseconds: few calls.
        echo "== two ranks on one GPU, which take turns"
        "$perf" --check --nranks 2 --operation all_reduce,all_to_all --begin 100B --end 40KiB --factor 400
    fi
}

figures() {
    nccl=${MCCS_NCCL:-$(python3 -c 'import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], "lib", "libnccl.so.2"))')}
    export NCCL_NVLS_ENABLE=0
    for nranks in $([ "$gpus" -ge 4 ] && echo 4) 2; do
        [ "$nranks" -le "$gpus" ] || continue
        "$perf" --nranks "$nranks" --operation "${MCCS_OPERATIONS:-all_reduce,all_gather,reduce_scatter,all_to_all,broadcast}" \
            --begin 8B --end "${MCCS_END:-512MiB}" --factor 4 --rounds "${MCCS_ROUNDS:-3}" --nccl "$nccl" ${OUT:+--json "$OUT/cuda-$nranks.json"}
    done
}

case $what in
checks) checks ;;
figures) figures ;;
all) checks; figures ;;
*) echo "usage: tests/gpu.sh [checks|figures|all]" >&2; exit 2 ;;
esac
"$MCCS_BIN/mccsctl" --help >/dev/null
kill -0 "$service" || { echo "tests/gpu.sh: the service has died" >&2; exit 1; }
echo "tests/gpu.sh: done"
