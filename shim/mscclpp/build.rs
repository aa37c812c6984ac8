//! Links `libmscclpp.so`: without the C API of `mccs`, which comes with the crate and is
//! `libmccs.so`'s alone.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
