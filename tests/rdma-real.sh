#!/usr/bin/env bash
# Tests on a machine with a real RDMA NIC: the transport's suite, GPUDirect, relaxed ordering,
# rates. In one run: what is there, memory of GPUs by dma-buf and by the peer-memory module with
# its flush, and the rest. docs/RDMA.md says how to read it.
#
# usage: tests/rdma-real.sh [--device NAME] [--gid INDEX] [--suite PROGRAM] [--rehearse]
#
# --device is the NIC (default: the first whose port is up), --gid the index of its GID (default: the first of RoCE v2, else 0).
# --suite names the transport's tests as a program, for machines without cargo (cargo test -p mccs-transport --lib --no-run makes it).
# --rehearse does all of it on emulated NICs and GPUs, and says nothing of hardware.
#
# Ends with status 1 if something that is there does not work, or if there is no NIC. Needs a C compiler, cargo (or --suite),
# libibverbs, and for GPUs the CUDA driver. Nothing on the machine is changed. Loopback: both sides of each test use the same NIC.
set -euo pipefail
cd "$(dirname "$0")/.."

device='' gid='' program='' rehearses=''
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --gid) gid=$2; shift 2 ;;
        --suite) program=$2; shift 2 ;;
        --rehearse) rehearses=1; shift ;;
        *) echo "tests/rdma-real.sh: $1 is none of --device, --gid, --suite, --rehearse" >&2; exit 2 ;;
    esac
done

work=$(mktemp -d -p /dev/shm)
trap 'rm -rf "$work"' EXIT
results=() failed=0

found() { printf '   %-22s %s\n' "$1" "$2"; }
result() { results+=("$(printf '%-46s %s' "$1" "$2")"); }
# Runs a step called $1, with its output shown; it works or it fails.
step() {
    local name=$1 status=0
    shift
    echo "== $name"
    "$@" 2>&1 | sed 's/^/   /' || status=$?
    if [ "$status" = 0 ]; then result "$name" works; else result "$name" "FAILS (status $status)"; failed=1; fi
}
absent() { echo "== $1"; found "not there" "$2"; result "$1" "not there: $2"; }
missing() { echo "tests/rdma-real.sh: $1" >&2; exit 1; }
one_line() { tr '\n' ' ' < "$1" 2> /dev/null || echo unknown; }

# NICs of the kernel's: their ports, kinds, rates, addresses.
find_nics() {
    local folder port name index
    [ -n "$(ls /sys/class/infiniband 2> /dev/null)" ] || missing "no RDMA NIC: /sys/class/infiniband is empty. Load the NIC's driver (mlx5_ib, bnxt_re, ...)"
    [ -n "$(ls /dev/infiniband/uverbs* 2> /dev/null)" ] || missing "no /dev/infiniband/uverbs*: load ib_uverbs, or give this container the devices"
    for folder in /sys/class/infiniband/*; do
        name=${folder##*/}
        for port in "$folder"/ports/*; do
            found "$name port ${port##*/}" "$(one_line "$port/state")$(one_line "$port/link_layer")$(one_line "$port/rate")PCI $(basename "$(readlink -f "$folder/device")") NUMA $(one_line "$folder/device/numa_node")"
            if grep -q ACTIVE "$port/state" && [ "${port##*/}" = 1 ]; then device=${device:-$name}; fi
            for index in "$port"/gid_attrs/types/*; do
                grep -q . "$index" 2> /dev/null || continue
                found "  GID ${index##*/}" "$(one_line "$index")$(one_line "$port/gids/${index##*/}")"
                if [ "$name" = "$device" ] && [ -z "$gid" ] && grep -q 'RoCE v2' "$index"; then gid=${index##*/}; fi
            done
        done
    done
    [ -n "$device" ] || missing "no port 1 of a NIC is ACTIVE: connect one, or set its link up"
    gid=${gid:-0}
    library=$(ldconfig -p | sed -n 's/.*libibverbs.so.1 .*=> //p' | head -n 1)
    [ -n "$library" ] || missing "no libibverbs.so.1: install rdma-core"
}

# Emulated ones, by the same names.
make_nics() {
    cargo build --quiet -p mccs-emulated-nics -p mccs-emulated-driver
    tests/nics/versioned target/debug/libmccs_emulated_nics.a "$work/libibverbs.so.1"
    cp target/debug/libmccs_emulated_driver.so "$work/libcuda.so.1"
    cp target/debug/libmccs_emulated_driver.so "$work/libcuda.so"
    printf '%s\n' "h0 nic0 10.77.0.1 100000 1500" "h1 nic1 10.77.0.2 100000 1500" > "$work/devices"
    export MCCS_NICS=$work MCCS_EMULATED_GPUS=2 LD_LIBRARY_PATH="$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    library=$work/libibverbs.so.1 device='' gid=0
    found rehearsal "two emulated NICs and GPUs: nothing below is of hardware"
}

# Measures whether GPUs' memory goes on the wire, and how fast.
find_path() {
    found kernel "$(uname -r)"
    found "locked memory" "$(ulimit -l) KiB"
    found IOMMU "$(ls /sys/class/iommu 2> /dev/null | tr '\n' ' ' || true)$(grep -o 'iommu=[^ ]*' /proc/cmdline || true)"
    found "peer-memory module" "$(cat /sys/module/nvidia_peermem/version 2> /dev/null || echo 'not loaded (modprobe nvidia_peermem)')"
    found "ACS on bridges" "$(lspci -vvv 2> /dev/null | grep -c 'ACSCtl:.*SrcValid+' || true) that send peers' traffic up to the root"
    if command -v nvidia-smi > /dev/null; then nvidia-smi topo -m | sed 's/^/   /'; fi
}

sequence() { timeout 300 "$work/nccl_sequence" "$library" "$@"; }
ordered() { MCCS_TEST_ORDERED=1 sequence "$@"; }

suite() {
    local skip=() test
    [ -n "$program" ] || program=$(cargo test -p mccs-transport --lib --no-run 2>&1 | sed -n 's/.*(\(.*\/mccs_transport-.*\))/\1/p')
    # They change network interfaces.
    for test in a_device_that_is_removed_and_made_again a_link_that_comes_back a_link_that_falls_silent \
        an_address_that_goes_and_another_that_comes flows_fail_over_and_come_home; do
        skip+=(--skip "$test")
    done
    timeout 900 "$program" --ignored on_devices --test-threads 1 "${skip[@]}"
}

# Memory of GPUs by $1, whose name for readers is $2.
gpu_memory() {
    step "memory of GPUs by $2: data and flush" sequence "$1" check
    step "memory of GPUs by $2: rate, relaxed ordering" sequence "$1" rate
    step "memory of GPUs by $2: rate, ordered" ordered "$1" rate
}

echo "== what is there"
if [ -n "$rehearses" ]; then make_nics; else find_nics; fi
find_path
found "used" "${device:-the first NIC}, GID $gid, $library"
cc -std=gnu11 -O2 -Wall -Wextra -Werror tests/nics/nccl_sequence.c -o "$work/nccl_sequence" -ldl -pthread
export MCCS_TEST_GID=$gid
if [ -n "$device" ]; then export MCCS_TEST_NIC=$device MCCS_TEST_RDMA_DEVICES=$device; fi

step "memory of the host: data and flush" sequence host check
step "memory of the host: rate, relaxed ordering" sequence host rate
step "memory of the host: rate, ordered" ordered host rate
step "memory of the host: what it costs processors" sequence host cost
step "the transport's suite" suite
if ! ldconfig -p | grep -q libcuda.so.1 && [ -z "$rehearses" ]; then
    absent "memory of GPUs" "no CUDA driver (libcuda.so.1)"
else
    gpu_memory dma-buf "dma-buf"
    if [ -n "$rehearses" ] || [ -e /sys/module/nvidia_peermem ]; then
        gpu_memory peer "the peer-memory module"
    else
        absent "memory of GPUs by the peer-memory module" "nvidia_peermem is not loaded"
    fi
fi

echo "== results${rehearses:+ of a rehearsal: emulated NICs and GPUs}"
printf '   %s\n' "${results[@]}"
exit "$failed"
