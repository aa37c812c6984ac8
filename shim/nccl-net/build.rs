//! Links `libnccl-net-mccs.so`: its soname, and that it stays loaded. NCCL unloads a plugin with its last
//! communicator, while threads of the library may still run.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-mccs.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
