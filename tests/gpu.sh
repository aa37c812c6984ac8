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
    [ -z "$service" ] || kill "$service" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

# With lines for the section [cuda].
serve() {
    if [ -n "$service" ]; then
        kill "$service"
        wait "$service" || { echo "tests/gpu.sh: the service has died" >&2; exit 1; }
    fi
    cat > "$work/service.toml" <<TOML
[service]
name = "gpu-host"
runtime_dir = "$work/run"
[limits]
operation_timeout = "60s"
[cuda]
use = "required"
${1:-}
[[tenant]]
name = "tests"
max_memory = "64GiB"
TOML
    : > "$work/ready"
    "$MCCS_BIN/mccs-service" --config "$work/service.toml" > "$work/ready" 2> >(tee "$work/service.log" >&2) &
    service=$!
    until grep -q ready "$work/ready"; do
        kill -0 "$service" 2>/dev/null || { echo "tests/gpu.sh: the service did not start" >&2; exit 1; }
        sleep 0.1
    done
}
serve
export MCCS_SOCKET=$work/run/mccs.sock
nvidia-smi -L | sed 's/ (UUID.*//'
perf=$MCCS_BIN/mccs-cuda-perf

checks() {
    for nranks in 1 $(seq 2 "$gpus"); do
        echo "== every collective, $nranks ranks"
        "$perf" --check --nranks "$nranks" --operation all --begin 1B --end 48KiB --factor 37
        "$perf" --check --nranks "$nranks" --operation all --begin 1MiB --end 3MiB --factor 3 --dtypes float,bfloat16 --redops sum,premulsum
    done
    for nranks in $(seq 2 "$gpus"); do
        echo "== by copy engines, $nranks ranks"
        serve 'large_from = "4KiB"
slot = "1MiB"'
        "$perf" --check --nranks "$nranks" --operation all --begin 1B --end 3MiB --factor 19 --dtypes float,bfloat16,uint8 --redops sum,avg
    done
    serve
    echo "== graphs, streams, tenants, failures"
    # One at a time: they look at the GPUs' free memory.
    "${gpu_tests:-$MCCS_BIN/gpu-tests}" --ignored --test-threads 1
    echo "== PyTorch, unchanged"
    if python3 -c 'import torch' 2>/dev/null; then
        LD_PRELOAD=$MCCS_BIN/libnccl.so.2 python3 tests/pytorch.py "$gpus"
    else
        echo "there is no PyTorch here: not run"
    fi
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
        "$perf" --nranks "$nranks" --operation all_gather,all_reduce --begin 256MiB --end 256MiB --rounds "${MCCS_ROUNDS:-3}" \
            --busy-sms 100 --nccl "$nccl" ${OUT:+--json "$OUT/cuda-overlap-$nranks.json"}
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
