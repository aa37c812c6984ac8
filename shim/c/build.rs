//! Links the library that is installed as `libmccs.so.0`: its soname has the version's first number.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let major = env!("CARGO_PKG_VERSION_MAJOR");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libmccs.so.{major}");
}
