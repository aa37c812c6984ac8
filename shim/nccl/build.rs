//! Gives the library the name under which programs look for NCCL, and keeps calls within it to itself: `pncclX` is for those who have put
//! functions of their own in the place of `ncclX`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
