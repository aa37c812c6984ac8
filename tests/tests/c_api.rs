//! The C API, from C: compiled with the system's compiler against the header and the library.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use mccs_tests::TestService;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Builds libmccs.so into a target directory of its own: the one in use is locked by the running `cargo test`'s build
/// only, but may belong to another profile.
fn library_directory() -> PathBuf {
    let directory = std::env::current_exe().expect("own path");
    let target = directory.ancestors().nth(3).expect("target directory").join("c-api");
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "mccs", "--lib", "--target-dir"])
        .arg(&target)
        .current_dir(workspace())
        .status();
    assert!(status.expect("cargo").success(), "libmccs.so does not build");
    target.join("debug")
}

fn compile(source: &Path, library: &Path, program: &Path) {
    let status = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1"])
        .arg("-I")
        .arg(workspace().join("shim/include"))
        .arg(source)
        .arg("-L")
        .arg(library)
        .args(["-lmccs", "-o"])
        .arg(program)
        .status();
    assert!(status.expect("a C compiler").success(), "{} does not compile", source.display());
}

#[test]
fn c_programs_run_and_misuse_is_refused() {
    let service = TestService::start("");
    let library = library_directory();
    let directory = tempfile::tempdir().expect("a directory");
    let start = |program: &Path, rank: u32| -> Child {
        Command::new(program)
            .env("LD_LIBRARY_PATH", &library)
            .env("MCCS_SOCKET", service.socket(0))
            .env("MCCS_RANK", rank.to_string())
            .env("MCCS_NRANKS", "2")
            .env("MCCS_UNIQUE_ID", "00112233445566778899aabbccddeeff")
            .spawn()
            .expect("a C program")
    };
    let example = directory.path().join("all_reduce");
    compile(&workspace().join("shim/examples/c/all_reduce.c"), &library, &example);
    let ranks = [start(&example, 0), start(&example, 1)];
    for mut rank in ranks {
        assert!(rank.wait().expect("a rank").success());
    }
    let misuse = directory.path().join("misuse");
    compile(&workspace().join("tests/tests/misuse.c"), &library, &misuse);
    assert!(start(&misuse, 0).wait().expect("misuse").success());
}
