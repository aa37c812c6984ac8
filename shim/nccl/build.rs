//! Links `libnccl.so.2`: its soname, and calls within the library, which stay in it (`-Bsymbolic`).
//! `pncclX` is for those who have put functions of their own in the place of `ncclX`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
