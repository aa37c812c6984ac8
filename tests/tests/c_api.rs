//! The C API, from C: compiled with the system's compiler against the header and the library.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use mccs_tests::TestService;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Where libmccs.so is: beside this test, as it was built for it. Being a library of several kinds, the shim is built as all of
/// them whenever tests need one.
fn library_directory() -> PathBuf {
    let program = std::env::current_exe().expect("own path");
    let directory = program.parent().expect("a directory").to_owned();
    assert!(directory.join("libmccs.so").exists(), "no libmccs.so in {}", directory.display());
    directory
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
    // As far as it goes where there is no GPU.
    let cuda = directory.path().join("cuda_all_reduce");
    compile(&workspace().join("shim/examples/c/cuda_all_reduce.c"), &library, &cuda);
    let misuse = directory.path().join("misuse");
    compile(&workspace().join("tests/tests/misuse.c"), &library, &misuse);
    assert!(start(&misuse, 0).wait().expect("misuse").success());
}
