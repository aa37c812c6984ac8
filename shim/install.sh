#!/usr/bin/env bash
# Installs libmccs.so, mccs.h, mccs/device.cuh, and pkg-config and CMake files, below a prefix (default
# /usr/local). Build first: cargo build --release -p mccs
set -euo pipefail
prefix="${1:-/usr/local}"
shim="$(cd "$(dirname "$0")" && pwd)"
library="${CARGO_TARGET_DIR:-$shim/../target}/release/libmccs.so"
version="$(sed -n 's/^version = "\(.*\)"/\1/p' "$shim/../Cargo.toml" | head -n 1)"
cmake="$prefix/lib/cmake/mccs"
install -d "$prefix/lib/pkgconfig" "$cmake" "$prefix/include"
install -m 755 "$library" "$prefix/lib/"
install -m 644 "$shim/include/mccs.h" "$prefix/include/"
install -d "$prefix/include/mccs"
install -m 644 "$shim/include/mccs/device.cuh" "$prefix/include/mccs/"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$shim/mccs.pc.in" > "$prefix/lib/pkgconfig/mccs.pc"
for file in mccsConfig.cmake mccsConfigVersion.cmake; do
    sed -e "s|@VERSION@|$version|" "$shim/$file.in" > "$cmake/$file"
done
