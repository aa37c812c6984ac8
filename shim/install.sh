#!/usr/bin/env bash
# Installs the C library, mccs.h, mccs/device.cuh, and pkg-config and CMake files, below a
# prefix (default /usr/local), the library in a folder of it (default lib). DESTDIR goes before the
# prefix, as of a package to be. Build first: cargo build --release -p mccs-c
set -euo pipefail
prefix="${1:-/usr/local}" libdir="${2:-lib}"
to="${DESTDIR:-}$prefix"
shim="$(cd "$(dirname "$0")" && pwd)"
library="${CARGO_TARGET_DIR:-$shim/../target}/release/libmccs_c.so"
version="$(sed -n 's/^version = "\(.*\)"/\1/p' "$shim/../Cargo.toml" | head -n 1)"
cmake="$to/$libdir/cmake/mccs"
# From the CMake files' folder to the prefix.
up="$(sed 's|[^/]*|..|g' <<< "$libdir/cmake/mccs")"
install -d "$to/$libdir/pkgconfig" "$cmake" "$to/include/mccs"
install -m 644 "$library" "$to/$libdir/libmccs.so.${version%%.*}"
ln -sf "libmccs.so.${version%%.*}" "$to/$libdir/libmccs.so"
install -m 644 "$shim/include/mccs.h" "$to/include/"
install -m 644 "$shim/include/mccs/device.cuh" "$to/include/mccs/"
fill() {
    sed -e "s|@PREFIX@|$prefix|" -e "s|@LIBDIR@|$libdir|" -e "s|@UP@|$up|" -e "s|@VERSION@|$version|" "$shim/$1.in" > "$2/$1"
}
fill mccs.pc "$to/$libdir/pkgconfig"
fill mccsConfig.cmake "$cmake"
fill mccsConfigVersion.cmake "$cmake"
