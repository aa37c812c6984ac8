//! `quickstart` with the real programs: each step has its output, and nothing is left.

use std::path::Path;

use crate::support::{Done, Fixture};

#[test]
fn quickstart_shows_each_step_and_leaves_nothing() {
    // Other packages' programs, which `cargo test --workspace` builds, and `cargo build --workspace --bins`.
    for program in ["mccs-service", "mccsctl", "mccs-perf"] {
        let path = Path::new(env!("CARGO_BIN_EXE_mccs-launch")).with_file_name(program);
        assert!(path.exists(), "build it first: cargo build --workspace --bins ({} is not there)", path.display());
    }
    let fixture = Fixture::with("", "");
    let before = std::fs::read_dir(fixture.dir.path()).expect("a folder").count();
    let done = Done::new(fixture.command(&["quickstart", "--no-build"]).output().expect("the launcher"));
    assert_eq!(done.code, 0, "{done:?}");
    for step in ["sessions", "communicators", "watch --once", "why-stuck", "tenants"] {
        assert!(done.stdout.contains(&format!("\n$ mccsctl {step}")), "{step} is missing: {done:?}");
    }
    for shown in ["session tenant", "busbw", "rounds/s", "# wrong elements: 0", "nothing is left on this machine"] {
        assert!(done.stdout.contains(shown), "{shown:?} is missing: {done:?}");
    }
    fixture.nobody_is_left();
    assert_eq!(std::fs::read_dir(fixture.dir.path()).expect("a folder").count(), before);
}
