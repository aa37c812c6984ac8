//! NCCL's library, where there is no GPU: what it exports, what it answers without a service, and whose sessions it has.

// The library itself is what is looked at, not its Rust side.
use nccl as _;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mccs_tests::{TestService, watchdog};
use tempfile::TempDir;

/// The functions of NCCL 2.32.3, one a line, sorted.
const EXPORTED: &str = include_str!("nccl-2.32.3-exports.txt");

/// Beside this test: a library of several kinds is built as all of them whenever tests need one.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("own path");
    let library = program.parent().expect("a directory").join("libnccl.so");
    assert!(library.exists(), "no {}", library.display());
    library
}

#[test]
fn tells_its_version_to_whoever_reads_its_file() {
    let file = std::fs::read(library()).expect("a file");
    assert_eq!(mccs_ipc::library_mark::version_in(&file), Some(env!("CARGO_PKG_VERSION")));
}

#[test]
fn exports_nccls_functions() {
    let listed = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().expect("nm, of binutils");
    let listed = String::from_utf8(listed.stdout).expect("text");
    let names = || listed.lines().filter_map(|line| line.split_whitespace().last());
    let others: Vec<_> = names().filter(|name| name.starts_with("mccs")).collect();
    assert!(
        others.is_empty(),
        "a program that has libmccs.so, too, would call one library with the other's objects: {others:?}"
    );
    let mut exported: Vec<_> = names().filter(|name| name.starts_with("nccl") || name.starts_with("pnccl")).collect();
    exported.sort_unstable();
    assert_eq!(exported, EXPORTED.lines().collect::<Vec<_>>());
}

/// A program that imports every function finds each at its start, before it has called any.
#[test]
fn a_program_that_imports_every_function_runs() {
    let declared: String = EXPORTED.lines().map(|name| format!("extern void {name}(void);\n")).collect();
    let listed: String = EXPORTED.lines().map(|name| format!("    {name},\n")).collect();
    let (directory, count) = (tempfile::tempdir().expect("a directory"), EXPORTED.lines().count());
    let source = directory.path().join("imports.c");
    let program = format!(
        "{declared}static void (*const all[])(void) = {{\n{listed}}};\nint main(void) {{\n    int found = 0;\n    \
         for (unsigned i = 0; i < sizeof all / sizeof *all; i++) found += all[i] != 0;\n    \
         return found != {count};\n}}\n"
    );
    std::fs::write(&source, program).expect("a file");
    let (program, libraries) = compiled(source.to_str().expect("a path of letters"));
    let ended = Command::new(program).env("LD_LIBRARY_PATH", libraries.path()).env("LD_BIND_NOW", "1").output();
    let ended = ended.expect("it runs");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

/// Compiles a program of this folder against the library. Returns it, and the folder with the library under the name that programs look
/// for.
fn compiled(source: &str) -> (PathBuf, TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let (library, program) = (library(), directory.path().join("program"));
    std::os::unix::fs::symlink(&library, directory.path().join("libnccl.so.2")).expect("a link");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-O1"])
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../shim/examples/c"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source))
        .arg(&library)
        .args(["-ldl", "-pthread", "-o"])
        .arg(&program)
        .status();
    assert!(compiled.expect("a C compiler").success(), "it does not compile");
    (program, directory)
}

#[test]
fn answers_without_a_service() {
    let (program, directory) = compiled("nccl.c");
    let mut run = Command::new(&program);
    run.env("LD_LIBRARY_PATH", directory.path()).env_remove("MCCS_SOCKET").env_remove("NCCL_DEBUG");
    let ended = run.output().expect("it runs");
    let printed = |output: &[u8]| String::from_utf8_lossy(output).into_owned();
    assert!(ended.status.success() && ended.stderr.is_empty(), "{}", printed(&ended.stderr));
    assert!(ended.stdout.is_empty(), "{}", printed(&ended.stdout));
    // Errors are printed for who asks for it.
    let ended = run.env("NCCL_DEBUG", "warn").output().expect("it runs");
    let warnings = printed(&ended.stdout);
    assert!(ended.status.success() && ended.stderr.is_empty());
    assert!(
        warnings.lines().any(|line| line.ends_with("NCCL WARN invalid usage: ncclGroupEnd without ncclGroupStart"))
    );
    // The same lines into a file.
    let file = directory.path().join("debug.%h.%p");
    let ended = run.env("NCCL_DEBUG_FILE", &file).output().expect("it runs");
    assert!(ended.status.success() && ended.stdout.is_empty() && ended.stderr.is_empty());
    let files: Vec<_> = std::fs::read_dir(directory.path()).expect("a folder").flatten().collect();
    let file = files.iter().find(|file| file.file_name().to_string_lossy().starts_with("debug.")).expect("the file");
    assert!(!file.file_name().to_string_lossy().contains('%'));
    let in_file = std::fs::read_to_string(file.path()).expect("text");
    assert_eq!(in_file.lines().count(), warnings.lines().count());
    // Subsystems that are not there print nothing.
    let ended = run.env_remove("NCCL_DEBUG_FILE").env("NCCL_DEBUG_SUBSYS", "NOTHING").output().expect("it runs");
    assert!(ended.status.success() && ended.stdout.is_empty());
}

#[test]
fn handles_that_are_made_up_are_refused() {
    let (program, directory) = compiled("nccl_handles.c");
    let ended = Command::new(&program).env("LD_LIBRARY_PATH", directory.path()).output().expect("it runs");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn a_new_service_and_a_forked_process_get_sessions() {
    watchdog();
    let ((program, directory), mut service) = (compiled("nccl_session.c"), TestService::start(""));
    let mut process = Command::new(&program)
        .env("LD_LIBRARY_PATH", directory.path())
        .env("MCCS_SOCKET", service.socket(0))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut says = BufReader::new(process.stdout.take().expect("its output")).lines();
    let mut hears = process.stdin.take().expect("its input");
    let mut expect = |what: &str| assert_eq!(says.next().expect("a line").expect("its output"), what);
    let mut go_on = |line: &str| writeln!(hears, "{line}").expect("it reads");
    expect("has a session");
    service.stop();
    let next = TestService::start("");
    let sessions = || next.service().registry.sessions().len();
    go_on(next.socket(0).to_str().expect("a path of letters"));
    expect("has another");
    while sessions() == 0 {
        go_on("again");
        expect("has another");
    }
    go_on("");
    expect("has its own");
    assert_eq!(sessions(), 2);
    go_on("");
    expect("goes on");
    // The child's has ended with it, this process' has not.
    while sessions() > 1 {
        std::thread::yield_now();
    }
    assert_eq!(sessions(), 1);
    go_on("");
    assert!(process.wait().expect("its end").success());
}
