#!/bin/bash
# Everything that needs a GPU: fails where there is none. Runs what cargo builds, or what is in the
# folder MCCS_BIN, so that binaries built elsewhere can be carried to a machine with GPUs and
# without Rust: there the tests of `cargo test --no-run --release -p mccs-tests --test gpu` are
# called gpu-tests.
#
#   tests/gpu.sh [values|tests|programs|services|memcheck|mps|clients|figures|all]...      default: all but clients and figures
#
# clients runs what others wrote, as far as it is installed (tests/clients). One that fails does not
# keep the others from running. MCCS_NCCL_TESTS names a folder of nccl-tests' programs, and
# MCCS_NCCL_TESTS_MPI one of programs that were built with MPI. CLIENTS, if it is set, has the clients
# to run, by spaces: torch accelerate lightning deepspeed megatron.core jax cupy nccl-tests. A client
# has CLIENT_SECONDS (500) to end; no test of PyTorch's own begins in the second half.
#
# A missing ability of the host is said, and fails if it was asked for by name. GPU_TESTS, if it is
# set, has filters of the tests of `tests`, by spaces: their names, or parts of them. On one GPU
# these take seven minutes, since processes take turns there.
#
# MCCS_RANKS, if it is set, has how many ranks the checks of `values` are run by, by spaces: fewer counts
# take less time.
#
# MCCS_NCCL names NCCL's library, for figures beside it (eval/cuda.py). Results go to the folder
# OUT, if it is set: gpu-checks.md says what was checked, and where (MCCS_COMMIT names the commit
# where there is no git).
set -euo pipefail
cd "$(dirname "$0")/.."
asked=$*
what=(${@:-values tests programs services memcheck mps})
[ "${what[*]}" != all ] || what=(values tests programs services memcheck mps clients figures)
for part in "${what[@]}"; do
    case $part in
    values | tests | programs | services | memcheck | mps | clients | figures) ;;
    *) echo "usage: tests/gpu.sh [values|tests|programs|services|memcheck|mps|clients|figures|all]..." >&2; exit 2 ;;
    esac
done
nvidia-smi -L >/dev/null 2>&1 || { echo "tests/gpu.sh: there is no GPU here (nvidia-smi -L)" >&2; exit 1; }
gpus=$(nvidia-smi -L | grep -c '^GPU')
counts=${MCCS_RANKS:-$(seq 2 "$gpus")}
if [ -z "${MCCS_BIN:-}" ]; then
    cargo build --release --quiet -p mccs-service -p mccs-ctl -p mccs-eval -p mccs-nccl -p mccs-nccl-net -p mccs-c
    cargo build --release --quiet -p mccs --lib --example cuda_all_reduce
    cargo test --release --quiet --no-run -p mccs-tests --test gpu
    MCCS_BIN=$PWD/target/release
    ln -sf libnccl.so "$MCCS_BIN/libnccl.so.2"
    gpu_tests=$(ls -t target/release/deps/gpu-* | grep -v '\.d$' | head -1)
fi
MCCS_BIN=$(realpath "$MCCS_BIN")
gpu_tests=${gpu_tests:-$MCCS_BIN/gpu-tests}
work=$(mktemp -d)
service=
mps_control=$(PATH=$PATH:/usr/local/nvidia/bin type -P nvidia-cuda-mps-control || true)
# An MPS server of our own, which only those find who are told its folder.
end_mps() {
    [ -d "$work/mps" ] || return 0
    echo quit | CUDA_MPS_PIPE_DIRECTORY=$work/mps timeout 20 "$mps_control" >/dev/null 2>&1 || true
    rm -rf "$work/mps"
}
finish() {
    end_mps
    for process in $service ${more:-}; do kill "$process" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

# Starts the service called $1, whose configuration is there; its process is in `started`.
start() {
    : > "$work/$1.ready"
    "$MCCS_BIN/mccs-service" --config "$work/$1.toml" > "$work/$1.ready" 2> >(tee "$work/$1.log" >&2) &
    started=$!
    until grep -q ready "$work/$1.ready"; do
        kill -0 "$started" 2>/dev/null || { echo "tests/gpu.sh: the service $1 did not start" >&2; exit 1; }
        sleep 0.1
    done
}

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
    start service
    service=$started
}
serve
export MCCS_SOCKET=$work/run/mccs.sock
nvidia-smi -L | sed 's/ (UUID.*//'
perf=$MCCS_BIN/mccs-cuda-perf
summary=${OUT:-$work}/gpu-checks.md
{
    echo "# Checks on GPUs"
    echo
    echo "- commit: ${MCCS_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}; command: \`tests/gpu.sh $asked\`; $(date -u +%F)"
    echo "- machine: $gpus x $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1 | sed 's/, /, driver /'), $(nproc) cores"
    echo
    echo "| check | result | s |"
    echo "| --- | --- | --- |"
} > "$summary"

# Runs a check, and notes what became of it: its last line says what it did. A failure ends this
# script, unless `goes_on` is set: then it is added to the list `failed`.
lane() {
    local name=$1 begin=$SECONDS status=0
    shift
    echo "== $name (at $SECONDS s)"
    "$@" 2>&1 | tee "$work/lane.log" || status=$?
    if [ $status = 0 ]; then
        echo "| $name | $(grep -v '^ *$' "$work/lane.log" | tail -1 | tr '|' ' ') | $((SECONDS - begin)) |" >> "$summary"
    else
        echo "| $name | **FAILED** ($status) | $((SECONDS - begin)) |" >> "$summary"
        echo "tests/gpu.sh: failed: $name" >&2
        [ -n "${goes_on:-}" ] || exit 1
        failed+=("$name")
    fi
}

absent() {
    echo "== $1: not run: $2"
    echo "| $1 | not run: $2 | 0 |" >> "$summary"
}

# The whole of what may have been asked for by name.
lacking() {
    absent "$1" "$2"
    [[ " $asked " != *" $3 "* ]] || { echo "tests/gpu.sh: failed: $1: $2" >&2; exit 1; }
}

# As many processes as ranks, told who they are as mccs-launch tells them.
ranks() {
    local nranks=$1 id rank pids=() status=0
    shift
    id=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    for rank in $(seq 0 $((nranks - 1))); do
        MCCS_UNIQUE_ID=$id MCCS_NRANKS=$nranks MCCS_RANK=$rank "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    return $status
}

# Two services on this machine, joined by TCP, and three that carry everything out themselves, one
# in host memory and by its engines, one by engines from few bytes on, and one by engines with
# streams that wait for events: their sockets in `two`, `strict`, `by_engines` and `by_events`.
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
    sed "s|$work/strict|$work/engines|; s|use = \"required\"|use = \"required\"\nlarge_from = \"16B\"\nslot = \"1MiB\"|" "$work/strict.toml" > "$work/engines.toml"
    start engines
    more+=" $started"
    sed "s|$work/engines|$work/events|; s|use = \"required\"|use = \"required\"\nordering = \"events\"|" "$work/engines.toml" > "$work/events.toml"
    start events
    more+=" $started"
    two=$work/h0/mccs.sock,$work/h1/mccs.sock
    strict=$work/strict/mccs.sock
    by_engines=$work/engines/mccs.sock
    by_events=$work/events/mccs.sock
}

# Every function of the C API, by two ranks, each at a service of its own.
calls_over_two() {
    local at=(${two/,/ })
    MCCS_ROOT_ADDRESS=h0 ranks 2 env LD_LIBRARY_PATH="$work/lib:$MCCS_BIN" bash -c 'shift "$MCCS_RANK"; MCCS_SOCKET=$1 exec "$0"' \
        "$work/cuda_calls" "${at[@]}"
}

# Through services: every collective, element type and reduction; NCCL's calls; PyTorch.
services() {
    start_more
    compile
    local all=("$two" "$strict")
    if [ "$gpus" -gt 1 ]; then
        all+=("$by_engines" "$by_events")
    else
        absent "through 1 services, by engines; by engines and events" "it takes two GPUs"
    fi
    for sockets in "${all[@]}"; do
        for nranks in 2 $([ "$gpus" -le 2 ] || echo "$gpus"); do
            local through
            through="through $(tr , ' ' <<< "$sockets" | wc -w) services"
            [ "$sockets" != "$by_engines" ] || through+=", by engines"
            [ "$sockets" != "$by_events" ] || through+=", by engines and events"
            through+=", $nranks ranks"
            lane "$through, 1 B to 48 KiB" \
                "$perf" --check --socket "$sockets" --nranks "$nranks" --operation all --begin 1B --end 48KiB --factor 37
            lane "$through, 1 to 9 MiB" \
                "$perf" --check --socket "$sockets" --nranks "$nranks" --operation all --begin 1MiB --end 9MiB --factor 3 --dtypes float,bfloat16 --redops sum,premulsum
        done
    done
    if [ -x "$work/nccl_calls" ]; then
        lane "in C: NCCL's calls over two services" env LD_LIBRARY_PATH="$MCCS_BIN" "$work/nccl_calls" 2 ${two/,/ }
        lane "in C: cuda_calls over two services" calls_over_two
        lane "in C: NCCL's calls through one service" env LD_LIBRARY_PATH="$MCCS_BIN" "$work/nccl_calls" 2 "$strict"
    fi
    if [ "$gpus" = 1 ]; then
        absent "PyTorch over two services; through one service" "it takes two GPUs"
    elif ! python3 -c 'import torch' 2>/dev/null; then
        absent "PyTorch over two services; through one service" "there is no PyTorch here"
    else
        lane "PyTorch over two services" env LD_PRELOAD="$MCCS_BIN/libnccl.so.2" python3 tests/pytorch.py "$gpus" ${two/,/ }
        mkdir -p "$work/net"
        ln -sf "$MCCS_BIN/libnccl_net_mccs.so" "$work/net/libnccl-net-mccs.so"
        lane "PyTorch with stock NCCL over two services" \
            env LD_LIBRARY_PATH="$work/net" NCCL_NET_PLUGIN=mccs python3 tests/pytorch.py "$gpus" ${two/,/ }
        lane "PyTorch through one service" env LD_PRELOAD="$MCCS_BIN/libnccl.so.2" MCCS_HOST_STAGED=1 python3 tests/pytorch.py "$gpus" "$strict"
    fi
    python_arrays
    python_torch
}

# GPUs' arrays in Python: by kernels, through one service, and through two.
python_arrays() {
    if ! python3 -c 'import mccs' 2>/dev/null; then
        absent "arrays of GPUs in Python" "the package mccs is not installed here (python/build-wheel)"
    elif ! python3 -c 'import cupy' 2>/dev/null && ! python3 -c 'import torch' 2>/dev/null; then
        absent "arrays of GPUs in Python" "there is neither CuPy nor PyTorch here"
    else
        local nranks
        for nranks in 1 $counts; do lane "arrays of GPUs in Python, $nranks ranks" python3 tests/python_gpu.py "$nranks"; done
        [ "$gpus" = 1 ] || lane "arrays of GPUs in Python, through one service" python3 tests/python_gpu.py "$gpus" "$strict"
        [ "$gpus" = 1 ] || lane "arrays of GPUs in Python, over two services" python3 tests/python_gpu.py "$gpus" ${two/,/ }
    fi
}

# PyTorch's process group of mccs. Ranks of one GPU take turns.
python_torch() {
    if ! python3 -c 'import mccs' 2>/dev/null; then
        absent "PyTorch's process group of mccs" "the package mccs is not installed here (python/build-wheel)"
    elif ! python3 -c 'import torch' 2>/dev/null; then
        absent "PyTorch's process group of mccs" "there is no PyTorch here"
    else
        local nranks
        for nranks in 1 ${counts:-2}; do lane "PyTorch's process group of mccs, $nranks ranks" python3 tests/python_torch.py "$nranks"; done
        lane "PyTorch's process group of mccs, through one service" python3 tests/python_torch.py 2 "$strict"
        lane "PyTorch's process group of mccs, over two services" python3 tests/python_torch.py 2 ${two/,/ }
    fi
}

# Every collective, element type and reduction, by every way.
values() {
    for nranks in 1 $counts; do
        lane "every collective, type and reduction; $nranks ranks, 1 B to 48 KiB" \
            "$perf" --check --nranks "$nranks" --operation all --begin 1B --end 48KiB --factor 37
        lane "every collective; $nranks ranks, 100 KB to 13 MiB" \
            "$perf" --check --nranks "$nranks" --operation all --begin 100004B --end 13MiB --factor 5 --dtypes float,bfloat16 --redops sum,premulsum
    done
    for nranks in $counts; do
        lane "1 to 8 MB at odd addresses, $nranks ranks" \
            "$perf" --check --nranks "$nranks" --operation all --begin 1000001B --end 8MiB --factor 2 --dtypes uint8,bfloat16 --redops sum,max
    done
    for nranks in $counts; do
        serve 'large_from = "4KiB"
slot = "1MiB"'
        lane "by copy engines, $nranks ranks" \
            "$perf" --check --nranks "$nranks" --operation all --begin 1B --end 3MiB --factor 19 --dtypes float,bfloat16,uint8 --redops sum,avg
    done
    serve 'large_from = "0"'
    for nranks in $counts; do
        lane "long operations by the ranks' kernels, $nranks ranks" \
            "$perf" --check --nranks "$nranks" --operation all --begin 23MiB --end 46MiB --factor 2 --dtypes float --redops sum
    done
    serve 'll128 = false'
    for nranks in $counts; do
        lane "without LL128, $nranks ranks" \
            "$perf" --check --nranks "$nranks" --operation all --begin 9001B --end 9MiB --factor 3 --dtypes float,bfloat16 --redops sum
    done
    serve 'max_ctas = 2'
    for nranks in $counts; do
        lane "in two blocks at most, $nranks ranks" \
            "$perf" --check --nranks "$nranks" --operation all --begin 1B --end 9MiB --factor 31 --dtypes float --redops sum
    done
    serve 'll128 = false
large_from = "0"
chunk = "48KiB"'
    for nranks in $counts; do
        lane "in chunks of 48 KiB, $nranks ranks" \
            "$perf" --check --nranks "$nranks" --operation all --begin 1MiB --end 40MiB --factor 6 --dtypes float --redops sum
    done
    for from in measured 1MiB; do
        serve "large_from = \"$from\""
        lane "steps of training, large_from $from, $gpus ranks" "$MCCS_BIN/mccs-cuda-training" --nranks "$gpus" --side "mccs=$MCCS_SOCKET" \
            --layers 4 --width 768 --tokens 768 --steps 3 --rounds 1
    done
    serve 'handles = "never"
large_from = "1MiB"'
    for nranks in $counts; do
        lane "memory by descriptors alone, $nranks ranks" \
            "$perf" --check --nranks "$nranks" --operation all --begin 1KiB --end 9MiB --factor 9 --dtypes float,bfloat16 --redops sum
    done
    serve
    if [ "$gpus" = 1 ]; then
        # Time slices of two milliseconds: few calls.
        lane "two ranks on one GPU, which take turns" \
            "$perf" --check --nranks 2 --operation all_reduce,all_to_all --begin 100B --end 40KiB --factor 400
    fi
}

# Programs in C, where there is a compiler.
compile() {
    type -P cc >/dev/null || return 0
    # The C library, by the names that it is installed as.
    mkdir -p "$work/lib"
    ln -sf "$MCCS_BIN/libmccs_c.so" "$work/lib/libmccs.so.0"
    ln -sf libmccs.so.0 "$work/lib/libmccs.so"
    local program
    for program in shim/examples/c/cuda_{all_reduce,put,all_gather}.c tests/tests/cuda_calls.c; do
        cc -I shim/include -I shim/examples/c "$program" -L "$work/lib" -lmccs -ldl -pthread -o "$work/$(basename "$program" .c)"
    done
    cc -rdynamic -I shim/examples/c tests/tests/nccl_calls.c "$MCCS_BIN/libnccl.so.2" -ldl -pthread -o "$work/nccl_calls"
    cc -I shim/examples/c tests/tests/nccl_handles.c "$MCCS_BIN/libnccl.so.2" -ldl -pthread -o "$work/nccl_handles"
    cc -std=gnu11 -I shim/examples/c tests/tests/nccl_hung.c "$MCCS_BIN/libnccl.so.2" -ldl -pthread -o "$work/nccl_hung"
    cc -I shim/examples/c tests/tests/nccl_profiler.c "$MCCS_BIN/libnccl.so.2" -ldl -pthread -o "$work/nccl_profiler"
    local version
    for version in 1 2 3 4 5 6 7; do
        cc -std=gnu11 -shared -fPIC -DVERSION=$version tests/tests/nccl_profiler_plugin.c -o "$work/plugin.$version.so"
    done
}

# Order of the tests.
tests() {
    # One at a time: they look at the GPUs' free memory.
    local skipped=(--skip under_mps --skip gpus_that_do_not_reach --skip more_ranks_than_reach --skip counts:: --skip a_gpu_that_breaks
        --skip a_call_that_fails_behind_its_command)
    absent "how often calls ask the driver" "the emulated driver counts; tests/gpu-emulated.sh has it"
    absent "a call that fails behind its command" "a real driver launches graphs in streams of other GPUs, too; tests/gpu-emulated.sh has it"
    absent "a GPU that breaks for all processes" "nobody breaks a real one on purpose; tests/gpu-emulated.sh has it"
    absent "GPUs without peer access; sixteen ranks on one GPU" "some of sixteen processes got no context on one H200; tests/gpu-emulated.sh has both"
    if [ "$gpus" = 1 ]; then
        skipped+=(--skip gpus_need_not_reach --skip bad_luck:: --skip deaths:: --skip divided:: --skip losses:: --skip memory:: --skip process_groups:: --skip room:: --skip large_calls_go_by_copy_engines --skip streams_of_one_name)
        absent "bad luck across hosts; services and commands that large operations outlive; copy engines; streams of one name; no peer access" "it takes two GPUs"
        absent "memory of every kind, freed memory, memory of others, many process groups" "it takes two GPUs"
    fi
    if [ "$gpus" = 2 ]; then
        skipped+=(--skip who_writes_back_to_a_gather)
        absent "who writes over what ranks of a gather wait for" "it takes three GPUs"
    fi
    # With the time that each takes, which only the compiler's development versions say unasked.
    lane "graphs, streams, sends and receives, tenants, failures, crashes${GPU_TESTS:+: $GPU_TESTS}" \
        env RUSTC_BOOTSTRAP=1 "$gpu_tests" -Z unstable-options --report-time --ignored --test-threads 1 "${skipped[@]}" ${GPU_TESTS:-}
}

# Programs as users write them.
programs() {
    if python3 -c 'import torch' 2>/dev/null; then
        lane "PyTorch, unchanged" env LD_PRELOAD="$MCCS_BIN/libnccl.so.2" python3 tests/pytorch.py "$gpus"
        # Memory that goes to other processes by descriptors, and memory that never does.
        for allocator in $([ "$gpus" = 1 ] || echo expandable_segments:True backend:cudaMallocAsync); do
            lane "PyTorch, $allocator" env PYTORCH_CUDA_ALLOC_CONF="$allocator" LD_PRELOAD="$MCCS_BIN/libnccl.so.2" python3 tests/pytorch.py "$gpus"
        done
        lane "PyTorch: losses of DDP, FSDP2 and experts as on NCCL" \
            env MCCS_BIN="$MCCS_BIN" eval/training.py tiny --tiny --rounds 1 --nranks "$gpus" --out "$work" --commit "${MCCS_COMMIT:-unknown}"
    else
        absent "PyTorch, unchanged" "there is no PyTorch here"
    fi
    lane "the example in Rust" ranks 2 "$MCCS_BIN/examples/cuda_all_reduce"
    if [ "$(id -u)" = 0 ] && type -P setpriv >/dev/null; then
        # Users that may neither look into this script's folder nor, maybe, into that of the programs.
        chmod 711 "$work"
        install -m 755 "$MCCS_BIN/examples/cuda_all_reduce" "$work/example"
        serve 'large_from = "1MiB"'
        lane "the example in Rust, by another user than the service" \
            ranks 2 setpriv --reuid 65534 --regid 65534 --clear-groups "$work/example"
        lane "the example in Rust, in other PID namespaces" ranks 2 unshare --fork --pid --mount-proc "$work/example"
        ! grep 'copy their buffers' "$work/service.log" || { echo "tests/gpu.sh: failed: the driver opens no handles of other users or namespaces" >&2; exit 1; }
        # Memory of such ranks is not opened by the driver.
        lane "the example in Rust, in other PID namespaces, with the service's number" \
            ranks 2 unshare --fork --pid --mount-proc bash -c 'echo $(($0 - 1)) > /proc/sys/kernel/ns_last_pid || exit; "$@"; exit' "$service" "$work/example"
        [ "$gpus" = 1 ] || grep -q 'copy their buffers' "$work/service.log" || { echo "tests/gpu.sh: failed: memory did not go by descriptors" >&2; exit 1; }
        serve
    else
        absent "the example in Rust, by another user than the service, and in other PID namespaces" "it takes root, and setpriv"
    fi
    compile
    if [ -x "$work/nccl_calls" ]; then
        local program
        for program in cuda_all_reduce cuda_calls; do
            lane "in C: $program" ranks 2 env LD_LIBRARY_PATH="$work/lib" "$work/$program"
        done
        for program in cuda_put cuda_all_gather; do
            if [ -x "${MCCS_NVCC:-}" ]; then
                "$MCCS_NVCC" -ptx -arch=compute_80 -I shim/include "shim/examples/c/$program.cu" -o "$work/$program.ptx"
                lane "in C: $program" ranks 2 env LD_LIBRARY_PATH="$work/lib" "$work/$program" "$work/$program.ptx"
            else
                absent "in C: $program" "MCCS_NVCC names no compiler for its kernel"
            fi
        done
        for nranks in 2 $([ "$gpus" -le 2 ] || echo "$gpus"); do
            lane "in C: NCCL's calls, $nranks ranks" env LD_LIBRARY_PATH="$MCCS_BIN" "$work/nccl_calls" "$nranks"
        done
        local way
        for way in $([ "$gpus" = 1 ] || echo exit signal crash); do
            lane "in C: a collective that one rank does not call, $way" env LD_LIBRARY_PATH="$MCCS_BIN" "$work/nccl_hung" 1000000 "$way"
        done
        lane "in C: handles that are misused" env LD_LIBRARY_PATH="$MCCS_BIN" "$work/nccl_handles" living
        local version
        for version in $([ "$gpus" = 1 ] || echo 1 2 3 4 5 6 7); do
            lane "in C: a profiler plugin of version $version" env LD_LIBRARY_PATH="$MCCS_BIN" NCCL_PROFILER_PLUGIN="$work/plugin.$version.so" \
                "$work/nccl_profiler" "$version" "$work/events.$version"
        done
    else
        absent "the example in C, every function, and NCCL's" "there is no C compiler here"
    fi
}

# Every collective by two ranks, of floats that are summed, and nothing else, as the arguments say:
# under the memory checker, which makes kernels some hundred times slower.
checked_memory() {
    local name=$1
    shift
    lane "memory checker: $name" "$checker" --tool memcheck --target-processes all --error-exitcode 9 \
        "$perf" --check --nranks 2 --operation all --dtypes float --redops sum "$@"
}

# A few calls of each family of kernels that ranks launch: LL and LL128 at a short and at a long size,
# LL in many blocks, Simple, sends and receives, reductions behind copy engines, copies and words of
# staged ranks. Left out: the service's own kernels, which reduce by the same code, other types, and
# graphs.
memcheck() {
    local checker
    checker=$(PATH=$PATH:/usr/local/cuda/bin type -P compute-sanitizer || true)
    if [ -z "$checker" ]; then
        lacking "memory checker" "there is no compute-sanitizer here" memcheck
        return
    fi
    checked_memory "LL and LL128" --begin 1KiB --end 1MiB --factor 900
    lane "memory checker: sends and receives of two ranks" ranks 2 "$checker" --tool memcheck --error-exitcode 9 \
        "$MCCS_BIN/examples/cuda_all_reduce"
    serve 'll128 = false
large_from = "0"'
    checked_memory "LL in many blocks, and Simple" --begin 900KiB --end 3MiB --factor 3
    if [ "$gpus" -gt 1 ]; then
        serve 'large_from = "4KiB"
slot = "1MiB"'
        checked_memory "what ranks combine of large operations" --begin 64KiB --end 64KiB
    fi
    serve 'execution = "service"
ordering = "kernels"
large_from = "0"'
    checked_memory "beside the service: short data, and long data behind kernels" --begin 1KiB --end 256KiB --factor 256
    serve
}

mps() {
    if [ -z "$mps_control" ]; then
        lacking "tenants under MPS" "there is no nvidia-cuda-mps-control here" mps
        return
    fi
    mkdir "$work/mps"
    CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps "$mps_control" -d
    lane "tenants under MPS, the service not" env MCCS_GPU_MPS="$work/mps" MCCS_BIN="$MCCS_BIN" "$gpu_tests" --ignored --test-threads 1 under_mps
    grep -q 'NEW CLIENT' "$work/mps/control.log" || { echo "tests/gpu.sh: nobody used the MPS server" >&2; exit 1; }
    end_mps
}

# A check of a client, which gets no longer than it may take.
client() {
    local name=$1
    shift
    lane "$name" timeout --kill-after 10 "${CLIENT_SECONDS:-500}" env "$@"
    # The next lane is not to blame.
    kill -0 "$service" 2>/dev/null || { echo "tests/gpu.sh: the service has died: $name" >&2; exit 1; }
}

is_asked_for() {
    [ -z "${CLIENTS:-}" ] || [[ " $CLIENTS " == *" $1 "* ]]
}

# nccl-tests' programs of a folder by one way to make ranks, each collective; fails where they find a
# wrong element.
nccl_tests() {
    local name=$1 folder=$2 collective
    shift 2
    for collective in all_reduce all_gather reduce_scatter alltoall broadcast reduce gather scatter sendrecv; do
        [ -x "$folder/${collective}_perf" ] || { absent "nccl-tests, $name: $collective" "it is not in $folder"; continue; }
        client "nccl-tests, $name: $collective" "$preload" "${launch[@]}" "$folder/${collective}_perf" -b 8 -e 64M -f 8 -n 5 -w 1 -c 1 "$@"
    done
}

nccl_tests_of_all_kinds() {
    local launch=()
    if [ -n "${MCCS_NCCL_TESTS:-}" ]; then
        nccl_tests "a thread a GPU" "$MCCS_NCCL_TESTS" -t "$gpus" -g 1
        nccl_tests "one thread for all GPUs" "$MCCS_NCCL_TESTS" -t 1 -g "$gpus"
        nccl_tests "graphs" "$MCCS_NCCL_TESTS" -t "$gpus" -g 1 -G 2
        nccl_tests "registered" "$MCCS_NCCL_TESTS" -t "$gpus" -g 1 -R 1
        nccl_tests "symmetric windows" "$MCCS_NCCL_TESTS" -t "$gpus" -g 1 -R 2
    else
        absent "nccl-tests" "MCCS_NCCL_TESTS names no folder"
    fi
    if [ -n "${MCCS_NCCL_TESTS_MPI:-}" ] && type -P mpirun >/dev/null; then
        launch=(mpirun --allow-run-as-root --oversubscribe -np "$gpus")
        nccl_tests "a process a GPU" "$MCCS_NCCL_TESTS_MPI" -t 1 -g 1
    else
        absent "nccl-tests, a process a GPU" "MCCS_NCCL_TESTS_MPI names no folder of programs with MPI, or there is no mpirun"
    fi
}

# Others' programs, in a default service.
clients() {
    serve
    if [ "$gpus" = 1 ]; then
        lacking "clients" "they take two GPUs" clients
        return
    fi
    local preload=LD_PRELOAD=$MCCS_BIN/libnccl.so.2 module program arguments goes_on=yes failed=()
    for module in torch:pytorch_own.py accelerate:accelerate_ddp.py lightning:lightning_ddp.py deepspeed:deepspeed_zero.py \
        megatron.core:megatron_parallel.py jax:jax_collectives.py:one jax:jax_collectives.py:each cupy:cupy_collectives.py; do
        IFS=: read -r module program arguments <<< "$module"
        is_asked_for "$module" || continue
        if ! python3 -c "import $module" 2> "$work/import"; then
            absent "$program" "there is no $module here: $(tail -1 "$work/import")"
        elif [ "$module" = torch ]; then
            client "PyTorch's import" MCCS_LIBRARY="$MCCS_BIN/libnccl.so.2" python3 tests/clients/pytorch_import.py
            # It runs tests on NCCL as well.
            client "PyTorch's own tests" MCCS_LIBRARY="$MCCS_BIN/libnccl.so.2" \
                python3 "tests/clients/$program" "$gpus" --seconds $((${CLIENT_SECONDS:-500} / 2))
        else
            client "$module: ${program%.py} $gpus $arguments" "$preload" python3 "tests/clients/$program" "$gpus" $arguments
        fi
    done
    ! is_asked_for nccl-tests || nccl_tests_of_all_kinds
    [ ${#failed[@]} = 0 ] || { cat "$summary"; printf 'tests/gpu.sh: failed: %s\n' "${failed[@]}" >&2; exit 1; }
}

figures() {
    local nranks name of
    for nranks in 1 $([ "$gpus" -ge 2 ] && echo 2); do
        MCCS_BIN=$MCCS_BIN eval/cuda_puts.py "cuda-puts-$nranks" --nranks "$nranks" --out "${OUT:-$work}" ${MCCS_COMMIT:+--commit "$MCCS_COMMIT"}
    done
    MCCS_BIN=$MCCS_BIN eval/cuda_costs.py cuda-costs --out "${OUT:-$work}" ${MCCS_COMMIT:+--commit "$MCCS_COMMIT"}
    for nranks in $([ "$gpus" -ge 4 ] && echo 4) 2; do
        [ "$nranks" -le "$gpus" ] || continue
        for name in cuda:sizes cuda-rooted:rooted cuda-overlap:beside cuda-overlap-all:beside-all cuda-points:points cuda-joins:joins; do
            of=${name#*:}
            MCCS_BIN=$MCCS_BIN eval/cuda.py "${name%:*}-$nranks" "$of" --nranks "$nranks" --rounds "${MCCS_ROUNDS:-3}" \
                --out "${OUT:-$work}" ${MCCS_COMMIT:+--commit "$MCCS_COMMIT"} ${MCCS_NCCL:+--nccl "$MCCS_NCCL"}
        done
    done
}

for part in "${what[@]}"; do "$part"; done
"$MCCS_BIN/mccsctl" --help >/dev/null
[ -z "${OUT:-}" ] || cat "$summary"
kill -0 "$service" || { echo "tests/gpu.sh: the service has died" >&2; exit 1; }
echo "tests/gpu.sh: done"
