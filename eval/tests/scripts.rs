//! The evaluation's scripts, on committed results: tables and figures are what the data beside them
//! give. They need Python, which no other test does.

use std::path::{Path, PathBuf};
use std::process::Command;

fn results() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("results")
}

fn script(name: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(name));
    // Scripts run programs that were built with this test.
    let program = Path::new(env!("CARGO_BIN_EXE_mccs-sim"));
    command.env("MCCS_BIN", program.parent().expect("a program is in a folder"));
    command
}

/// Returns what went wrong, if anything.
fn failure(command: &mut Command) -> Option<String> {
    let done = command.output().expect("python3 is there");
    (!done.status.success()).then(|| String::from_utf8_lossy(&done.stderr).into_owned())
}

/// Has a script write tables anew, beside copies of committed data, and compares them with the committed ones.
fn tables_are_as_committed(name: &str, results_of: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let copies = results_of.iter().map(|of| {
        let (data, copy) = (results().join(of).with_extension("json"), folder.path().join(of).with_extension("json"));
        std::fs::copy(&data, &copy).expect("committed data");
        copy
    });
    assert_eq!(failure(script(name).arg("--table").args(copies)), None);
    for of in results_of {
        let [now, committed] = [folder.path(), &results()]
            .map(|folder| std::fs::read_to_string(folder.join(of).with_extension("md")).expect("a table"));
        assert_eq!(now, committed, "{of}: {name} --table writes another table");
    }
}

/// Jobs compared with the simulator, which runs again, also of flows that a hash sent (`setup1`); by length; over time; alone.
#[test]
#[ignore = "needs Python"]
fn tables_of_scenarios_are_of_their_data_and_of_what_is_simulated_now() {
    let kinds = ["fabric-setup1", "fabric-shares", "fabric-single-sizes", "fabric-detour", "fabric-qos-alone-fair"];
    tables_are_as_committed("scenario.py", &kinds);
}

#[test]
#[ignore = "needs Python"]
fn tables_of_changes_are_of_their_data() {
    tables_are_as_committed("changes.py", &["changes", "changes-ways", "changes-all", "changes-deep"]);
}

#[test]
#[ignore = "needs Python"]
fn figures_are_of_the_data_beside_them() {
    assert_eq!(failure(script("plot.py").arg("--check").arg(results())), None);
}

#[test]
#[ignore = "needs Python"]
fn a_figure_of_other_data_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["fabric-shares.svg", "fabric-shares.json", "fabric-turns.svg", "fabric-turns.json"] {
        std::fs::copy(results().join(name), folder.path().join(name)).expect("a committed file");
    }
    let data = folder.path().join("fabric-turns.json");
    let text = std::fs::read_to_string(&data).expect("a committed file");
    std::fs::write(&data, text.replacen("\"seconds\": 3", "\"seconds\": 4", 1)).expect("a file of this test's");
    let failure = failure(script("plot.py").arg("--check").arg(folder.path())).expect("nothing is found");
    assert!(failure.contains("fabric-turns.svg") && !failure.contains("fabric-shares.svg"), "{failure}");
}

#[test]
#[ignore = "needs Python"]
fn headlines_are_of_their_data_and_every_file_of_data_is_on_a_page() {
    assert_eq!(failure(script("headlines.py").arg("--check")), None);
}

#[test]
#[ignore = "needs Python"]
fn a_headline_of_other_data_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    copy_of_results(folder.path());
    let check = || failure(Command::new("python3").arg(folder.path().join("eval/headlines.py")).arg("--check"));
    assert_eq!(check(), None, "a copy is as the committed files");

    let data = folder.path().join("eval/results/cuda-memory-2.json");
    let text = std::fs::read_to_string(&data).expect("a committed file");
    std::fs::write(&data, text.replacen("486", "586", 1)).expect("a file of this test's");
    std::fs::copy(&data, data.with_file_name("unknown.json")).expect("a file of this test's");
    let failure = check().expect("nothing is found");
    for told in ["README.md is stale", "eval/results/README.md is stale", "has the data unknown"] {
        assert!(failure.contains(told), "{failure}");
    }
}

/// Copies the files that `headlines.py` reads and writes to another root.
fn copy_of_results(root: &Path) {
    let of = results().join("../..");
    std::fs::create_dir_all(root.join("eval/results/experiments")).expect("a folder");
    let mut names = vec![PathBuf::from("README.md"), "eval/headlines.py".into(), "eval/bench.py".into()];
    for folder in ["eval/results", "eval/results/experiments"] {
        let entries = std::fs::read_dir(of.join(folder)).expect("a folder").map(|entry| entry.expect("an entry"));
        let files = entries.filter(|entry| entry.file_type().expect("a kind").is_file());
        names.extend(files.map(|entry| Path::new(folder).join(entry.file_name())));
    }
    for name in names {
        std::fs::copy(of.join(&name), root.join(&name)).expect("a committed file");
    }
}
