#!/bin/bash
# Runs the GPU tests on the emulated driver (tests/driver), on a host without any GPU. The driver
# is called libcuda.so in a folder of this script's own, so that nobody else finds it. Fails if
# anything fails. Kernels' images have to be built, as the service asks for them: MCCS_NVCC, see
# docs/CUDA.md.
#
# Tests that are not run are named below, with the reason, and printed.
set -euo pipefail
cd "$(dirname "$0")/.."

# The same features as the rest of .ci/run, so that nothing is built twice.
target=${CARGO_TARGET_DIR:-target}
cargo build --release --workspace --bins --lib --example cuda_all_reduce --example counting_profiler
gpu_tests=$(cargo test --release --workspace --test gpu --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\/gpu-.*\))/\1/p')
work=$(mktemp -d)
service=
finish() {
    [ -z "$service" ] || kill "$service" 2> /dev/null || true
    wait 2> /dev/null || true
    rm -rf "$work"
}
trap finish EXIT
mkdir "$work/driver"
cp "$target/release/libmccs_emulated_driver.so" "$work/driver/libcuda.so"
ln -s libcuda.so "$work/driver/libcuda.so.1"
export LD_LIBRARY_PATH="$work/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# The C library, by the names that it is installed as.
mkdir "$work/lib"
ln -s "$(realpath "$target/release/libmccs_c.so")" "$work/lib/libmccs.so.0"
ln -s libmccs.so.0 "$work/lib/libmccs.so"

skip=()
# Tests whose names contain $1 are not run, because of $2.
leave_out() {
    skip+=(--skip "$1")
    echo "   not run: $1: $2"
}

tests_on() {
    export MCCS_EMULATED_GPUS=$1
    skip=()
    echo "== tests of GPUs, on $1 emulated (at $SECONDS s)"
    leave_out under_mps "there is no MPS server without the driver's programs"
    leave_out gpus_that_do_not_reach "it takes GPUs without peer access, and has lines below"
    if [ "$1" = 2 ]; then
        leave_out who_writes_back_to_a_gather "it takes three GPUs, and has a line below"
    else
        # The processor makes and checks their data for a minute and more.
        local long="it takes long, and goes by memory of the host as on two"
        leave_out factors_are_taken_from_the_memory_of_gpus "$long"
        leave_out a_strict_service_does_everything_itself "$long"
        leave_out graphs_are_replayed_through_services "$long"
        leave_out two_services_reduce_what_their_gpus_have "$long"
        leave_out who_leaves_has_what_was_called "$long"
        leave_out captured_calls_are_replayed "it takes long; ranks_that_name_a_root does the same once"
    fi
    if [ "$1" -gt 2 ]; then
        leave_out values:: "it takes long, and the pairs of values are those of two ranks"
        local name
        for name in bad_luck:: counts:: deaths:: gpudirect:: losses:: memory:: memory_channels:: messages:: nics:: port_channels::a_ port_channels::puts_ rails:: room::; do
            leave_out "$name" "as on two"
        done
    fi
    if [ "$1" = 1 ]; then
        local name
        for name in bad_luck:: counts:: deaths:: divided:: losses:: memory:: messages:: nics:: port_channels::a_kernel_that_waits_is_let_go_when_its_peer_is_killed process_groups:: room:: large_calls_go_by_copy_engines streams_of_one_name all_hear_of gpus_need_not a_rank_for_which_rails_wait a_team_has_one_kernel; do
            leave_out "$name" "it takes two GPUs"
        done
    fi
    # One at a time: they look at the GPUs' free memory.
    "$gpu_tests" --ignored --test-threads 1 "${skip[@]}"
}

# Ranks order what they call on several streams by words, and by events on drivers that have none.
tests_without_words() {
    echo "== tests of several streams, of exchanges and graphs, on 2 emulated GPUs without stream memory operations (at $SECONDS s)"
    local names=(calls_keep_their_order captured_calls_are_replayed captured_groups_are_replayed groups_of_sends messages_are_passed_on two_tenants
        graphs_run graphs_fork a_rank_may_come_late_to)
    MCCS_EMULATED_GPUS=2 MCCS_EMULATED_WORDS=0 "$gpu_tests" --ignored --test-threads 1 "${names[@]}"
}

# Waits until the service called $1, with the process $2, is ready.
await() {
    until grep -q ready "$work/$1.ready"; do
        kill -0 "$2" 2> /dev/null || { echo "tests/gpu-emulated.sh: the service $1 did not start" >&2; exit 1; }
        sleep 0.1
    done
}

# A service with lines for the section [cuda].
serve() {
    if [ -n "$service" ]; then
        # shellcheck disable=SC2086 # there may be two
        kill $service
        # shellcheck disable=SC2086
        wait $service || true
    fi
    cat > "$work/service.toml" <<TOML
[service]
name = "gpu-host"
runtime_dir = "$work/run"
[cuda]
use = "required"
$1
[[tenant]]
name = "tests"
max_memory = "64GiB"
TOML
    : > "$work/service.ready"
    "$target/release/mccs-service" --config "$work/service.toml" > "$work/service.ready" &
    service=$!
    await service "$service"
}

# A second service, which the first one is told of: the sockets of both are in `two`.
serve_two() {
    local host more
    "$target/release/mccsctl" keys --hosts h0,h1 --dir "$work/keys" > /dev/null
    serve ''
    more=$service
    for host in 0 1; do
        sed "s|gpu-host|h$host|; s|$work/run|$work/h$host|" "$work/service.toml" > "$work/h$host.toml"
        cat >> "$work/h$host.toml" <<TOML
[exchange]
listen = "127.0.0.$((host + 2)):7431"
certificate = "$work/keys/h$host.crt"
key = "$work/keys/h$host.key"
authority = "$work/keys/authority.crt"
[[host]]
name = "h0"
address = "127.0.0.2:7431"
[[host]]
name = "h1"
address = "127.0.0.3:7431"
TOML
        "$target/release/mccs-service" --config "$work/h$host.toml" > "$work/h$host.ready" &
        more+=" $!"
        await "h$host" $!
    done
    service=$more
    two=("$work/h0/mccs.sock" "$work/h1/mccs.sock")
}

# Every call of NCCL's library, with so many ranks: at the service, or at those with the sockets
# that follow.
nccl_calls() {
    echo "== every call of NCCL's library: ${*##*/} (at $SECONDS s)"
    LD_LIBRARY_PATH="$work/nccl:$LD_LIBRARY_PATH" "$work/nccl_calls" "$@"
}

# Events for profiler plugins of all versions, and the lines of NCCL_DEBUG=INFO; at a service as the
# rest says (nccl_profiler.c).
profiler() {
    local version lines
    for version in 1 2 3 4 5 6 7; do
        echo "== a profiler plugin of version $version $* (at $SECONDS s)"
        cc -std=gnu11 -Wall -Wextra -Werror -shared -fPIC -DVERSION=$version tests/tests/nccl_profiler_plugin.c -o "$work/plugin.so"
        rm -f "$work/events"
        LD_LIBRARY_PATH="$work/nccl:$LD_LIBRARY_PATH" NCCL_PROFILER_PLUGIN="$work/plugin.so" NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$work/lines" \
            "$work/nccl_profiler" $version "$work/events" "$@"
    done
    # Collectives, kernels, messages, launches: what each lies in is told as well, and nothing else.
    local kinds
    for kinds in 2 64 4 2048; do
        echo "== a profiler plugin of version 7 that wants kinds $kinds $* (at $SECONDS s)"
        rm -f "$work/events"
        LD_LIBRARY_PATH="$work/nccl:$LD_LIBRARY_PATH" NCCL_PROFILER_PLUGIN="$work/plugin.so" MCCS_PROFILER_MASK=$kinds \
            "$work/nccl_profiler" 7 "$work/events" "$@"
    done
    echo "== a profiler plugin that is linked into the program $* (at $SECONDS s)"
    cc -std=gnu11 -Wall -Wextra -Werror -Wno-unused-variable -Wno-unused-function -rdynamic -DVERSION=5 -I shim/examples/c tests/tests/nccl_profiler.c \
        tests/tests/nccl_profiler_plugin.c "$work/nccl/libnccl.so.2" -ldl -pthread -o "$work/nccl_profiler_linked"
    rm -f "$work/events"
    LD_LIBRARY_PATH="$work/nccl:$LD_LIBRARY_PATH" NCCL_PROFILER_PLUGIN=STATIC_PLUGIN "$work/nccl_profiler_linked" 5 "$work/events" "$@"
    for lines in 'NCCL INFO NCCL version ' 'ncclCommInitAll comm 0x.* rank 1 nranks 2 cudaDev 1 .* - Init START' ' - Init COMPLETE' \
        ' - Destroy COMPLETE' 'NCCL INFO rank 1 of 2 has joined communicator ' 'NCCL INFO rank 1 has left communicator ' \
        'plugin of version 7: rank 0 of 2, by its logger' 'NCCL INFO PROFILER/Plugin: Loaded for tests (v7)'; do
        grep -q -- "$lines" "$work/lines" || { echo "tests/gpu-emulated.sh: NCCL_DEBUG=INFO printed no line with $lines" >&2; exit 1; }
    done
}

# A rank that waits for one that does not come ends, in every way in which programs end it.
hung() {
    local way count
    for way in exit signal crash; do
        for count in 100 1000000; do
            echo "== a collective of $count that one rank does not call, $way (at $SECONDS s)"
            LD_LIBRARY_PATH="$work/nccl:$LD_LIBRARY_PATH" "$work/nccl_hung" $count $way
        done
    done
}

# Every collective, with so many ranks, as the rest says.
check() {
    local nranks=$1
    shift
    echo "== every collective, $nranks ranks: $* (at $SECONDS s)"
    "$target/release/mccs-cuda-perf" --check --nranks "$nranks" --operation all "$@"
}

# Steps of training of a tiny model, whose results are checked.
training() {
    echo "== steps of training, 2 ranks (at $SECONDS s)"
    "$target/release/mccs-cuda-training" --nranks 2 --side "mccs=$MCCS_SOCKET" --layers 2 --width 128 --tokens 128 --bucket 100KiB \
        --first-bucket 8KiB --steps 2 --warmup 1 --rounds 2 --priority=-1
}

# The program that measures calls on GPUs works, and its plugin hears of them.
call_costs() {
    local plugin
    plugin=$(realpath "$target")/release/examples/libcounting_profiler.so
    echo "== what calls cost, 2 ranks (at $SECONDS s)"
    "$target/release/mccs-cuda-calls" --library "$work/nccl/libnccl.so.2" --rounds 2 --calls 20
    NCCL_PROFILER_PLUGIN=$plugin "$target/release/mccs-cuda-calls" --library "$work/nccl/libnccl.so.2" --rounds 2 --calls 20 --plugin "$plugin"
    if type -P valgrind > /dev/null; then
        echo "== instructions of a call, 2 ranks (at $SECONDS s)"
        mkdir "$work/instructions"
        MCCS_BIN=$(realpath "$target")/release python3 eval/call_instructions.py trial --rounds 2 --calls 50 --most 2000 \
            --out "$work/instructions" --commit trial
    else
        echo "   not run: instructions of a call: there is no valgrind"
    fi
}

# PyTorch's libraries load this one in the place of NCCL, where PyTorch is installed.
pytorch_import() {
    if python3 -c 'import torch' 2> /dev/null; then
        echo "== PyTorch's import (at $SECONDS s)"
        MCCS_LIBRARY="$work/nccl/libnccl.so.2" python3 tests/clients/pytorch_import.py
    else
        echo "   not run: PyTorch's import: it is not installed"
    fi
}

tests_on 2
tests_on 1
tests_on 3
echo "== who writes over what ranks wait for one after the other, on 3 emulated GPUs (at $SECONDS s)"
MCCS_EMULATED_GPUS=3 "$gpu_tests" --ignored who_writes_back_to_a_gather
echo "== teams of four, two and one on several hosts, on 4 emulated GPUs (at $SECONDS s)"
MCCS_EMULATED_GPUS=4 "$gpu_tests" --ignored --test-threads 1 rails::gpus_of_several_hosts rails::calls_in_place \
    gpudirect::rails_move_memory_of_gpus
tests_without_words
echo "== GPUs without peer access, and with access that loses data (at $SECONDS s)"
MCCS_EMULATED_GPUS=3 MCCS_EMULATED_UNREACHED=0-1,0-2,1-2 "$gpu_tests" --ignored gpus_that_do_not_reach
MCCS_EMULATED_GPUS=4 MCCS_EMULATED_LOSSY=0-2,0-3,1-2,1-3 "$gpu_tests" --ignored gpus_that_do_not_reach

# A process for each of two ranks, told who they are as mccs-launch tells them; each at a service,
# where there are two.
ranks() {
    local id rank pids=()
    echo "== two ranks: ${*##*/} (at $SECONDS s)"
    id=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    for rank in 0 1; do
        MCCS_SOCKET=${two[rank]:-$MCCS_SOCKET} MCCS_UNIQUE_ID=$id MCCS_NRANKS=2 MCCS_RANK=$rank "$@" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank"; done
}

export MCCS_EMULATED_GPUS=3 MCCS_SOCKET="$work/run/mccs.sock"
two=()
serve 'large_from = "1MiB"'
ranks "$target/release/examples/cuda_all_reduce"
# In PID namespaces of their own, but with this one's /proc, where the emulated driver looks; then
# as processes with the number of the service there, of which no handles are opened.
if [ "$(id -u)" = 0 ]; then
    ranks unshare --fork --pid "$target/release/examples/cuda_all_reduce"
    if [ -w /proc/sys/kernel/ns_last_pid ]; then
        # shellcheck disable=SC2016 # for the shell inside
        ranks unshare --fork --pid bash -c 'echo $(($0 - 1)) > /proc/sys/kernel/ns_last_pid || exit; "$@"; exit' "$service" "$target/release/examples/cuda_all_reduce"
    else
        echo "   not run: the example with the service's number: nobody may choose numbers here"
    fi
else
    echo "   not run: the example in other PID namespaces: it takes root"
fi
serve ''
for program in shim/examples/c/cuda_all_reduce.c tests/tests/cuda_calls.c; do
    name=$(basename "$program" .c)
    cc -std=c11 -I shim/include -I shim/examples/c "$program" -L "$work/lib" -lmccs -ldl -pthread -o "$work/$name"
    ranks env LD_LIBRARY_PATH="$work/lib:$LD_LIBRARY_PATH" "$work/$name"
done
# Kernels that put and copy, by the header for programs' own, compiled for this processor.
for name in puts cuda_put cuda_all_gather; do
    c++ -std=c++17 -O1 -Wall -Wextra -Werror -shared -fPIC -I shim/include "tests/driver/$name.cpp" -o "$work/$name-kernels.so"
done
for name in cuda_put cuda_all_gather; do
    cc -std=c11 -Wall -Wextra -Werror -Wno-unused-variable -I shim/include -I shim/examples/c "shim/examples/c/$name.c" -L "$work/lib" -lmccs -ldl -o "$work/$name"
    ranks env LD_LIBRARY_PATH="$work/lib:$LD_LIBRARY_PATH" "$work/$name" "$work/$name-kernels.so"
done
for nranks in 1 2; do
    echo "== port and memory channels of kernels, $nranks ranks (at $SECONDS s)"
    "$target/release/mccs-cuda-puts" --nranks $nranks --rounds 1 --iterations 20 --threads 1,8 --sizes 8,4096,262144 --packets 8,1024 --block-threads 4 --slots 16 --image "$work/puts-kernels.so"
done
mkdir "$work/nccl"
ln -s "$(realpath "$target")/release/libnccl.so" "$work/nccl/libnccl.so.2"
ln -sf libnccl.so "$target/release/libnccl.so.2"
cc -std=c11 -Wall -Wextra -Werror -Wno-unused-variable -rdynamic -I shim/examples/c tests/tests/nccl_calls.c "$work/nccl/libnccl.so.2" -ldl -pthread -o "$work/nccl_calls"
for nranks in 1 2 3; do nccl_calls $nranks; done
"$target/release/mccs-one-sided" --library "$work/nccl/libnccl.so.2" --rounds 1 --iterations 10 --sizes 8,65536 --total 1048576
cc -std=c11 -Wall -Wextra -Werror -Wno-unused-variable -I shim/examples/c tests/tests/nccl_handles.c "$work/nccl/libnccl.so.2" -ldl -pthread -o "$work/nccl_handles"
LD_LIBRARY_PATH="$work/nccl:$LD_LIBRARY_PATH" "$work/nccl_handles" living
cc -std=c11 -Wall -Wextra -Werror -Wno-unused-variable -Wno-unused-function -I shim/examples/c tests/tests/nccl_profiler.c "$work/nccl/libnccl.so.2" -ldl -pthread -o "$work/nccl_profiler"
profiler
cc -std=gnu11 -Wall -Wextra -Werror -Wno-unused-variable -Wno-unused-function -I shim/examples/c tests/tests/nccl_hung.c "$work/nccl/libnccl.so.2" -ldl -pthread -o "$work/nccl_hung"
hung
check 3 --begin 1B --end 48KiB --factor 37
check 2 --begin 100004B --end 4MiB --factor 6 --dtypes float,bfloat16 --redops sum,premulsum
training
call_costs
pytorch_import
serve 'max_ctas = 1'
check 3 --begin 1B --end 1MiB --factor 30 --dtypes float --redops sum
serve $'ll128 = false\nlarge_from = "0"\nchunk = "48KiB"'
check 3 --begin 1MiB --end 6MiB --factor 6 --dtypes float --redops sum
serve $'large_from = "4KiB"\nslot = "1MiB"'
check 3 --begin 1B --end 3MiB --factor 19 --dtypes float,bfloat16,uint8 --redops sum,avg
training
nccl_calls 3
profiler engines
hung
serve $'handles = "never"\nlarge_from = "4KiB"\nslot = "1MiB"'
check 3 --begin 1KiB --end 1MiB --factor 30 --dtypes float --redops sum
serve $'execution = "service"\nlarge_from = "16B"\nslot = "1MiB"'
check 3 --begin 1B --end 3MiB --factor 19 --dtypes float,uint8 --redops sum,premulsum
nccl_calls 3
hung
serve_two
for nranks in 2 3; do nccl_calls $nranks "${two[@]}"; done
for name in cuda_all_reduce cuda_calls; do
    MCCS_ROOT_ADDRESS=h0 ranks env LD_LIBRARY_PATH="$work/lib:$LD_LIBRARY_PATH" "$work/$name"
done
# The benchmark of GPUs on emulated NICs: two hosts with a NIC for each GPU. NCCL is a stub.
nics_bench() {
    local gpus=$1 uuids=() gpu out=$work/nics-$2
    for ((gpu = 0; gpu < gpus; gpu++)); do uuids+=("GPU-656d756c-6174-6564-2047-50552000000$gpu"); done
    echo "== eval/nics.py $2, $gpus GPUs (at $SECONDS s)"
    mkdir "$out"
    MCCS_BIN="$target/release" MCCS_EMULATED_GPUS=$gpus python3 eval/nics.py trial "$2" --nics "$work/libibverbs.so.1" --gpus "$gpus" \
        --uuids "$(IFS=,; echo "${uuids[*]}")" --machine "emulated GPUs" --commit trial --out "$out" --operations all_reduce,all_gather \
        --begin 1KiB --end 4MiB --factor 64 --check 300KiB --rounds 2 --gbit 10 --slot-kib 64 --slots 16 --spin-us 0 --copiers 0 "${@:3}"
}
# Claims about eight GPUs, in short. A library of ours stands for NCCL, and a script for nvidia-smi.
eight_gpus() {
    echo "== eval/eight_gpus.py (at $SECONDS s)"
    mkdir "$work/smi"
    printf '#!/bin/sh\necho "Emulated GPU, 0"\n' > "$work/smi/nvidia-smi"
    chmod +x "$work/smi/nvidia-smi"
    PATH="$work/smi:$PATH" MCCS_BIN="$(realpath "$target")/release" python3 eval/eight_gpus.py --tiny --limit 3600 --gpus "$MCCS_EMULATED_GPUS" \
        --nccl "ours=$work/nccl/libnccl.so.2" --out "$work/eight" --commit trial
    # A part that fails is named, and fails the whole.
    if PATH="$work/smi:$PATH" MCCS_BIN="$(realpath "$target")/release" python3 eval/eight_gpus.py --tiny --gpus "$MCCS_EMULATED_GPUS" \
        --nccl "none=$work/none" --parts cuda-8-nccl-none,tests --out "$work/none-eight" --commit trial; then
        echo "tests/gpu-emulated.sh: a library that is not there failed nothing" >&2
        exit 1
    fi
    grep -q '| cuda-8-nccl-none | \*\*FAILED\*\*' "$work/none-eight/eight-gpus.md"
}
tests/nics/versioned "$target/release/libmccs_emulated_nics.a" "$work/libibverbs.so.1"
cc -std=gnu11 -O2 -Wall -Wextra -Werror tests/nics/nccl_sequence.c -o "$work/nccl_sequence" -ldl -pthread
cc -shared -fPIC -O2 -Wall -Wextra -Werror tests/nics/nccl_stub.c -o "$work/nccl_stub.so"
nics_bench 4 gpudirect --rate "$work/nccl_sequence" --nccl "$work/nccl_stub.so"
nics_bench 2 sockets
export MCCS_EMULATED_GPUS=8
serve ''
check 8 --begin 1B --end 48KiB --factor 400 --dtypes float --redops sum
eight_gpus
echo "tests/gpu-emulated.sh: done in $SECONDS s"
