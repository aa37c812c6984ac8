//! The C API, from C: compiled with the system's compiler against the header and the library.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use mccs_c as _;
use mccs_tests::TestService;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The C library: beside this test, as it was built for it. Being a library of several kinds, its crate is built as all of them
/// whenever tests need one.
fn built_library() -> PathBuf {
    let program = std::env::current_exe().expect("own path");
    let library = program.parent().expect("a directory").join("libmccs_c.so");
    assert!(library.exists(), "no {}", library.display());
    library
}

/// A folder with the library by its names: that of the linker, and that which programs then ask for.
fn library_directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for name in ["libmccs.so", "libmccs.so.0"] {
        std::os::unix::fs::symlink(built_library(), directory.path().join(name)).expect("a link");
    }
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

/// `mccsctl doctor` compares it with the service's.
#[test]
fn the_library_tells_its_version_to_whoever_reads_its_file() {
    let file = std::fs::read(built_library()).expect("a file");
    assert_eq!(mccs_ipc::library_mark::version_in(&file), Some(env!("CARGO_PKG_VERSION")));
}

#[test]
fn c_programs_run_and_misuse_is_refused() {
    let service = TestService::start("");
    let libraries = library_directory();
    let library = libraries.path();
    let directory = tempfile::tempdir().expect("a directory");
    let start = |program: &Path, rank: u32| -> Child {
        Command::new(program)
            .env("LD_LIBRARY_PATH", library)
            .env("MCCS_SOCKET", service.socket(0))
            .env("MCCS_RANK", rank.to_string())
            .env("MCCS_NRANKS", "2")
            .env("MCCS_UNIQUE_ID", "00112233445566778899aabbccddeeff")
            // As mccs-launch sets it where all ranks are on one host.
            .env("MCCS_ROOT_ADDRESS", "")
            .spawn()
            .expect("a C program")
    };
    for name in ["all_reduce", "put"] {
        let example = directory.path().join(name);
        compile(&workspace().join(format!("shim/examples/c/{name}.c")), library, &example);
        let ranks = [start(&example, 0), start(&example, 1)];
        for mut rank in ranks {
            assert!(rank.wait().expect("a rank").success(), "{name}");
        }
    }
    // As far as it goes where there is no GPU.
    let cuda = directory.path().join("cuda_all_reduce");
    compile(&workspace().join("shim/examples/c/cuda_all_reduce.c"), library, &cuda);
    for name in ["cuda_put", "cuda_all_gather"] {
        compile(&workspace().join(format!("shim/examples/c/{name}.c")), library, &cuda);
    }
    let misuse = directory.path().join("misuse");
    compile(&workspace().join("tests/tests/misuse.c"), library, &misuse);
    assert!(start(&misuse, 0).wait().expect("misuse").success());
    // Without the variable it is the user's own service.
    std::fs::create_dir(directory.path().join("mccs")).expect("a folder");
    std::os::unix::fs::symlink(service.socket(0), directory.path().join("mccs/mccs.sock")).expect("a link");
    let found = Command::new(&misuse)
        .env("LD_LIBRARY_PATH", library)
        .env_remove("MCCS_SOCKET")
        .env("XDG_RUNTIME_DIR", directory.path())
        .status();
    assert!(found.expect("misuse").success());
}

/// As `docs/CLIENT.md` says, into a folder of the test's own.
#[test]
fn an_installed_library_is_found_by_pkg_config_and_cmake() {
    let directory = tempfile::tempdir().expect("a directory");
    let (target, prefix) = (directory.path().join("target"), directory.path().join("prefix"));
    std::fs::create_dir_all(target.join("release")).expect("a directory");
    std::fs::copy(built_library(), target.join("release/libmccs_c.so")).expect("copied");
    let installed = Command::new("bash")
        .arg(workspace().join("shim/install.sh"))
        .arg(&prefix)
        .env("CARGO_TARGET_DIR", &target)
        .status()
        .expect("bash");
    assert!(installed.success());
    let flags = Command::new("pkg-config")
        .args(["--cflags", "--libs", "mccs"])
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .output()
        .expect("pkg-config");
    assert!(flags.status.success(), "{}", String::from_utf8_lossy(&flags.stderr));
    let flags = String::from_utf8(flags.stdout).expect("UTF-8");
    let program = directory.path().join("all_reduce");
    let compiled = Command::new("cc")
        .arg(workspace().join("shim/examples/c/all_reduce.c"))
        .args(flags.split_whitespace())
        .arg("-o")
        .arg(&program)
        .status()
        .expect("a C compiler");
    assert!(compiled.success(), "{flags}");
    let service = TestService::start("");
    let rank = Command::new(&program)
        .env("LD_LIBRARY_PATH", prefix.join("lib"))
        .env("MCCS_SOCKET", service.socket(0))
        .envs([("MCCS_RANK", "0"), ("MCCS_NRANKS", "1"), ("MCCS_UNIQUE_ID", "00112233445566778899aabbccddeeff")])
        .status()
        .expect("a C program");
    assert!(rank.success());
    // Files that CMake's package names are there.
    let config = std::fs::read_to_string(prefix.join("lib/cmake/mccs/mccsConfig.cmake")).expect("installed");
    for file in ["lib/libmccs.so", "include"] {
        assert!(config.contains(&format!("${{_mccs_prefix}}/{file}\"")) && prefix.join(file).exists(), "{file}");
    }
}
