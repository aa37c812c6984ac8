//! Checks our declarations of verbs structures against the headers of libibverbs.

use std::fmt::Write;
use std::process::Command;

use super::sys::{CONSTANTS, LAYOUT, SIGNATURES};

/// A C program prints what the headers say. Without headers this fails: it is not to be run there.
#[test]
#[ignore = "needs a C compiler and libibverbs-dev: cargo test -p mccs-transport --lib declarations -- --ignored"]
fn declarations_are_those_of_the_headers() {
    let mut program: String = ["stddef.h", "stdio.h", "infiniband/verbs.h", "infiniband/mlx5dv.h"]
        .map(|it| format!("#include <{it}>\n"))
        .concat();
    program.push_str("int main(void) {\n");
    let values = LAYOUT.iter().map(|(name, value)| (*name, *value as u64));
    let values: Vec<_> =
        values.chain(CONSTANTS.iter().chain(SIGNATURES).map(|(name, value)| (*name, u64::from(*value)))).collect();
    for (name, _) in &values {
        writeln!(program, "printf(\"%llu\\n\", (unsigned long long)({name}));").expect("text");
    }
    program.push_str("return 0; }\n");
    let directory = tempfile::tempdir().expect("directory");
    let (source, binary) = (directory.path().join("layout.c"), directory.path().join("layout"));
    std::fs::write(&source, program).expect("writes");
    let compiled = Command::new("cc").args([&source]).arg("-o").arg(&binary).output().expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&binary).output().expect("runs").stdout;
    let said: Vec<u64> = String::from_utf8_lossy(&output).lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(said.len(), values.len());
    for ((name, ours), theirs) in values.into_iter().zip(said) {
        assert_eq!(ours, theirs, "{name}");
    }
}
