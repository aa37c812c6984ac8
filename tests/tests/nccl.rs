//! NCCL's library, where there is no GPU: what it exports, and what it answers without a service.

// The library itself is what is looked at, not its Rust side.
use nccl as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// NCCL 2.28.9's functions, but for those that help kernels of the caller's (teams, barriers, all-to-all of small
/// messages), of which `ncclDevCommCreate` says that they are not there.
const EXPORTED: &str = "ncclAllGather ncclAllReduce ncclAlltoAll ncclBcast ncclBroadcast ncclCommAbort ncclCommCount \
     ncclCommCuDevice ncclCommDeregister ncclCommDestroy ncclCommFinalize ncclCommGetAsyncError ncclCommInitAll \
     ncclCommInitRank ncclCommInitRankConfig ncclCommInitRankScalable ncclCommRegister ncclCommRevoke ncclCommShrink \
     ncclCommSplit ncclCommUserRank ncclCommWindowDeregister ncclCommWindowRegister ncclDevCommCreate ncclDevCommDestroy \
     ncclGather ncclGetErrorString ncclGetLastError ncclGetUniqueId ncclGetVersion ncclGroupEnd ncclGroupSimulateEnd \
     ncclGroupStart ncclMemAlloc ncclMemFree ncclRecv ncclRedOpCreatePreMulSum ncclRedOpDestroy ncclReduce \
     ncclReduceScatter ncclResetDebugInit ncclScatter ncclSend";

/// Beside this test: a library of several kinds is built as all of them whenever tests need one.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("own path");
    let library = program.parent().expect("a directory").join("libnccl.so");
    assert!(library.exists(), "no {}", library.display());
    library
}

#[test]
fn exports_nccls_functions() {
    let listed = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().expect("nm, of binutils");
    let listed = String::from_utf8(listed.stdout).expect("text");
    let names = listed.lines().filter_map(|line| line.split_whitespace().last());
    let mut exported: Vec<_> = names.filter(|name| name.starts_with("nccl")).collect();
    exported.sort_unstable();
    assert_eq!(exported, EXPORTED.split_whitespace().collect::<Vec<_>>());
}

#[test]
fn answers_without_a_service() {
    let directory = tempfile::tempdir().expect("a directory");
    let (library, program) = (library(), directory.path().join("nccl"));
    std::os::unix::fs::symlink(&library, directory.path().join("libnccl.so.2")).expect("a link");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl.c"))
        .arg(&library)
        .arg("-o")
        .arg(&program)
        .status();
    assert!(compiled.expect("a C compiler").success(), "it does not compile");
    // The name under which programs look for NCCL is the library's own.
    let mut run = Command::new(&program);
    let ended = run.env("LD_LIBRARY_PATH", directory.path()).env_remove("MCCS_SOCKET").status().expect("it runs");
    assert!(ended.success());
}
