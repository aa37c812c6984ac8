//! Layers: crates import only what is below them, and the modules of a folder import each other one way.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates, a layer a row, from the top down. A crate imports crates of the rows below its own.
const LAYERS: [&[&str]; 17] = [
    &["mccs-tests", "mccs-fuzz"],
    &[
        "mccs-eval",
        "mccs-launcher",
        "mccs-ctl",
        "mccs-slurm",
        "mccs-device-plugin",
        "mccs-console",
        "mccs-c",
        "mccs-nccl",
        "mccs-nccl-net",
        "mccs-mscclpp",
        "mccs-python",
    ],
    &["mccs-service"],
    &["mccs-engines"],
    &["mccs-registry"],
    &["mccs-control", "mccs-device"],
    &["mccs-controller", "mccs-tenants"],
    &["mccs-transport", "mccs-exchange", "mccs-handover"],
    &["mccs-telemetry"],
    &["mccs-policy", "mccs-collective", "mccs-runtime", "mccs-net", "mccs-store"],
    &["mccs-model"],
    &["mccs"],
    &["mccs-emulated-driver", "mccs-emulated-nics"],
    &["mccs-cuda"],
    &["mccs-kernels", "mccs-rails"],
    &["mccs-ipc"],
    &["mccs-config", "mccs-http"],
];

/// Manifests: the workspace's, and those of packages that are workspaces of their own.
const MANIFESTS: [&str; 4] =
    ["Cargo.toml", "python/Cargo.toml", "service/kubernetes/Cargo.toml", "tests/fuzz/Cargo.toml"];

/// Modules that import each other, by crate and folder, and why that is so. No modules: all of the folder may.
const CIRCLES: &[(&str, &[&str], &str)] = &[
    (
        "mccs-config::service",
        &["rdma", "tcp"],
        "a path of TCP names a device, and RDMA takes TCP's options for its paths",
    ),
    ("mccs-cuda", &["api", "error"], "an error asks the driver for its name; calls of the driver end with an error"),
    (
        "mccs-cuda",
        &["graph", "memory", "module", "stream"],
        "each of the driver's objects has methods that take the others",
    ),
    ("mccs-eval::cuda", &["nccl", "p2p", "rank"], "a rank of a benchmark runs p2p and collectives over either library"),
    (
        "mccs-eval::fabric",
        &["error", "execute", "netns", "remove", "state"],
        "an error names a fabric's phase, commands and name spaces end with errors, and a failed set-up is removed by its state",
    ),
    (
        "mccs-eval::simulator",
        &["cluster", "engine", "traffic"],
        "the simulated cluster runs engines whose traffic it carries",
    ),
    (
        "mccs",
        &[
            "builder",
            "client",
            "communicator",
            "cuda",
            "group",
            "memory",
            "port_channels",
            "shm_exchange",
            "stream",
            "submission",
        ],
        "a client makes communicators, streams and memory, a communicator port channels, and each keeps its client alive",
    ),
    (
        "mccs::cuda",
        &["communicator", "device_initiated", "p2p", "pinned", "rails", "service_executed", "host_staged"],
        "the kinds of execution are methods of one communicator",
    ),
    ("mccs::cuda::host_staged", &["captured", "p2p"], "captured graphs replay p2p, which records itself in them"),
    (
        "mccs-ipc",
        &["device_initiated", "large"],
        "the control page holds the numbers of copy engines' operations, whose layout names its ranks",
    ),
    ("mccs-runtime", &["executor", "mailbox", "runtimes"], "a waker routes to the executor that runs its engine"),
    (
        "mccs-transport::rdma",
        &["connection", "data_path", "device", "flow", "wakeup"],
        "a flow's connections lie on devices whose completions wake it",
    ),
    (
        "mccs-tests::attacker",
        &["requests", "session"],
        "requests are made of what a session has, which keeps what it has asked",
    ),
    ("mccs-launcher", &["run", "summary"], "a run ends with a summary of its processes"),
    ("mccs-launcher::spec", &["cluster", "planner"], "the plan of a cluster is a part of a job's plan"),
    (
        "mccs-engines::transport",
        &["channel", "events", "links"],
        "a channel steps over links, and links end with a channel's fault",
    ),
    ("mccs-engines::transport", &["channel_run", "workers"], "workers take pieces of the channel that runs"),
    ("mccs-device", &["call", "cuda", "host", "workers"], "a call is bound to the memory of either backend"),
    (
        "mccs-device::cuda",
        &["copy_engine", "group", "memory", "setup", "timing"],
        "a group of ranks owns memory and copy engines, which set-up makes and timing reads",
    ),
    (
        "mccs-device::cuda::memory",
        &["imports", "segments"],
        "a region is imported by handle or by segments, and counts alike",
    ),
    ("mccs-ctl", &["diff", "policy"], "a comparison is a command of policies, and shows strategies as they do"),
    ("mccs-ctl", &["view", "watch"], "a watch shows views of two looks"),
    (
        "mccs-nccl",
        &[
            "communicators",
            "debug",
            "split",
            "group",
            "grow",
            "lifecycle",
            "logger",
            "profiler",
            "queries",
            "device_comm",
            "windows",
        ],
        "NCCL's functions work on one table of communicators, which names them all",
    ),
    (
        "mccs-mscclpp",
        &["communicators", "connections", "registered_buffers"],
        "a communicator has connections and buffers, whose functions take communicators",
    ),
    (
        "mccs-tests::cluster",
        &["flight", "script"],
        "a script says which operations fly, and a flight checks what it said",
    ),
    ("mccs-tests::sim", &["proxy", "talks", "world"], "a simulated world has proxies that talk through it"),
    (
        "mccs-emulated-nics",
        &["completions", "queue_pair", "served"],
        "a poll of a completion queue serves queue pairs, which complete into such queues",
    ),
    ("mccs-emulated-nics", &["copiers", "gpu"], "copiers make the copies of a GPU, which hands them over and waits"),
    (
        "mccs-kernels::cuda",
        &["symmetric_buffer", "launch", "p2p", "strategy"],
        "a symmetric buffer has room for what launches of collectives and p2p use, which need its layout",
    ),
    (
        "mccs-emulated-driver",
        &["capture", "device", "event", "graph", "object", "stream", "wait"],
        "a driver's objects name each other: streams wait for events, graphs hold streams' work",
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A package of this repository.
struct Package {
    name: String,
    /// Folder of its manifest, from the root.
    folder: String,
    sources: PathBuf,
    /// Which of the others it imports outside of its tests.
    imports: Vec<String>,
}

fn packages() -> Vec<Package> {
    MANIFESTS.iter().flat_map(|manifest| packages_of(manifest)).collect()
}

fn packages_of(manifest: &str) -> Vec<Package> {
    let arguments = ["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path", manifest];
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(root()).output().expect("cargo runs");
    assert!(output.status.success(), "{manifest}: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    let top = root().canonicalize().expect("the repository");
    let package = |package: &serde_json::Value| {
        let dependencies = package["dependencies"].as_array().expect("a list");
        let normal = dependencies.iter().filter(|one| one["kind"].is_null() && !one["path"].is_null());
        let manifest = PathBuf::from(text(&package["manifest_path"])).canonicalize().expect("a manifest");
        let folder = manifest.parent().expect("a folder");
        Package {
            name: text(&package["name"]),
            folder: folder.strip_prefix(&top).expect("in the repository").to_string_lossy().into_owned(),
            sources: folder.join("src"),
            imports: normal.map(|one| text(&one["name"])).collect(),
        }
    };
    metadata["packages"].as_array().expect("a list").iter().map(package).collect()
}

/// Faults of crates' imports, given as name and imports.
fn upward_imports(packages: impl IntoIterator<Item = (String, Vec<String>)>) -> Vec<String> {
    let layer_of = |name: &str| LAYERS.iter().position(|layer| layer.contains(&name));
    let mut wrong = Vec::new();
    for (name, imports) in packages {
        let Some(layer) = layer_of(&name) else {
            wrong.push(format!("{name} has no layer: add it to LAYERS in tests/tests/layers.rs"));
            continue;
        };
        let is_below = |import: &String| layer_of(import).is_some_and(|below| below > layer);
        let upward = imports.into_iter().filter(|import| !is_below(import));
        wrong.extend(upward.map(|import| format!("{name} imports {import}, which is no layer below it")));
    }
    wrong
}

#[test]
fn crates_import_only_crates_of_lower_layers() {
    let wrong = upward_imports(packages().into_iter().map(|package| (package.name, package.imports)));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Folders that a crate map names, a layer a set: a row with a first cell begins one.
fn layers_of_map(map: &str) -> Vec<BTreeSet<String>> {
    let mut layers = Vec::<BTreeSet<String>>::new();
    for row in map.lines().filter(|line| line.starts_with("| ")).skip(2) {
        let mut cells = row.split('|').skip(1).map(str::trim);
        let (layer, folders) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
        if !layer.is_empty() || layers.is_empty() {
            layers.push(BTreeSet::new());
        }
        let named = folders.split('`').skip(1).step_by(2).map(str::to_owned);
        layers.last_mut().expect("pushed above").extend(named);
    }
    layers
}

#[test]
fn the_crate_map_of_the_architecture_has_the_layers() {
    let page = fs::read_to_string(root().join("docs/ARCHITECTURE.md")).expect("the page");
    let (_, rest) = page.split_once("\n## Crate map\n").expect("the section");
    let map = layers_of_map(rest.split("\n## ").next().expect("its text"));
    let packages = packages();
    let folder = |name: &&str| packages.iter().find(|one| one.name == *name).expect("a crate").folder.clone();
    let layers: Vec<BTreeSet<String>> = LAYERS.iter().map(|layer| layer.iter().map(folder).collect()).collect();
    assert_eq!(map, layers, "docs/ARCHITECTURE.md (left) and LAYERS (right) differ");
}

#[test]
fn a_map_is_read_by_layers() {
    let map =
        "Text.\n\n| layer | folder | what |\n| --- | --- | --- |\n| a | `b`, `c` | `d` |\n| | `e` | |\n| f | `g` | |\n";
    let set = |names: &[&str]| names.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
    assert_eq!(layers_of_map(map), [set(&["b", "c", "e"]), set(&["g"])]);
}

#[test]
fn an_import_of_a_higher_or_an_equal_layer_is_found() {
    let package = |name: &str, imports: &[&str]| (name.to_owned(), imports.iter().map(ToString::to_string).collect());
    let wrong = upward_imports([
        package("mccs-engines", &["mccs-model", "mccs-registry"]),
        package("mccs-policy", &["mccs-engines", "mccs-model"]),
        package("mccs-device", &["mccs-control"]),
        package("mccs-new", &[]),
    ]);
    let found: Vec<_> = wrong.iter().map(|one| one.split(',').next().unwrap_or_default()).collect();
    assert_eq!(found[..2], ["mccs-policy imports mccs-engines", "mccs-device imports mccs-control"]);
    assert!(found.len() == 3 && found[2].starts_with("mccs-new has no layer"), "{found:?}");
}

/// A path of modules, from the root of a crate.
type Module = Vec<String>;

/// Paths that a `use` tree names, such as `a::b` and `a::c` of `a::{b, c}`.
fn leaves(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((before, rest)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or(tree);
        return vec![path.trim().trim_end_matches("::*").to_owned()];
    };
    let body = &rest[..rest.rfind('}').unwrap_or(rest.len())];
    let (mut parts, mut depth, mut part) = (Vec::new(), 0, String::new());
    for character in body.chars() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(std::mem::take(&mut part));
                continue;
            }
            _ => {}
        }
        part.push(character);
    }
    parts.push(part);
    let parts = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
    parts.flat_map(leaves).map(|leaf| format!("{before}{leaf}")).collect()
}

/// A file's text up to a module of tests in it. That a file names a module of tests which is another file ends nothing.
fn without_tests(text: &str) -> &str {
    let marks = text.match_indices("#[cfg(test)]\nmod ");
    let begins =
        |(at, mark): &(usize, &str)| text[at + mark.len()..].lines().next().is_some_and(|line| line.ends_with('{'));
    marks.into_iter().find(begins).map_or(text, |(at, _)| &text[..at])
}

/// The `use` trees of a file, without those of its tests.
fn uses(text: &str) -> Vec<String> {
    let text = without_tests(text);
    let mut trees = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("use ") {
        let begins_line =
            rest[..at].rsplit('\n').next().is_some_and(|before| before.is_empty() || before.starts_with("pub"));
        rest = &rest[at + 4..];
        if begins_line {
            trees.extend(rest.split(';').next().map(|tree| tree.replace('\n', " ")));
        }
    }
    trees
}

/// Paths from `crate` or `super` on that a file names outside of its `use` trees, comments and tests.
fn inline_paths(text: &str) -> Vec<String> {
    let is_of_path = |character: char| character.is_alphanumeric() || "_:".contains(character);
    let mut paths = Vec::new();
    for line in without_tests(text).lines() {
        let code = line.split("//").next().unwrap_or_default();
        let is_use = code.trim_start().trim_start_matches("pub ").starts_with("use ");
        if is_use {
            continue;
        }
        for (at, first) in ["crate::", "super::"].iter().flat_map(|first| code.match_indices(first)) {
            let before = &code[..at];
            // `$crate` is a macro's, `pub(in crate::a)` says who sees, and what stands in a longer path is found from its beginning.
            if before.ends_with(|one: char| is_of_path(one) || one == '$') || before.ends_with("in ") {
                continue;
            }
            let rest = &code[at + first.len()..];
            let end = rest.find(|one| !is_of_path(one)).unwrap_or(rest.len());
            paths.push(format!("{first}{}", &rest[..end]).trim_end_matches(':').to_owned());
        }
    }
    paths
}

/// A crate's modules with their files' texts. Files of tests are left out.
fn modules(sources: &Path) -> BTreeMap<Module, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![(sources.to_owned(), Module::new())];
    while let Some((folder, module)) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            if name.ends_with("tests") || name == "bin" {
                continue;
            }
            let child = || module.iter().cloned().chain([name.clone()]).collect::<Module>();
            if path.is_dir() {
                folders.push((path, child()));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let is_of_folder = ["lib", "main", "mod"].contains(&name.as_str());
                let of = if is_of_folder { module.clone() } else { child() };
                found.entry(of).or_insert_with(String::new).push_str(&fs::read_to_string(&path).expect("a text"));
            }
        }
    }
    found
}

/// Begin of a path of a `use` in `module`, as a path from the crate's root; `None` if it is another crate's.
fn absolute(module: &Module, path: &str, all: &BTreeMap<Module, String>) -> Option<Module> {
    let mut segments = path.split("::").map(str::to_owned).peekable();
    let mut at = module.clone();
    match segments.peek()?.as_str() {
        "crate" => at = Module::new(),
        "self" | "super" => {
            segments = path.split("::").map(str::to_owned).peekable();
            while let Some(up) = segments.next_if(|one| one == "self" || one == "super") {
                if up == "super" {
                    at.pop();
                }
            }
            at.extend(segments);
            return Some(at);
        }
        first => {
            let child: Module = at.iter().cloned().chain([first.to_owned()]).collect();
            all.contains_key(&child).then_some(())?;
            at.extend(segments);
            return Some(at);
        }
    }
    at.extend(segments.skip(1));
    Some(at)
}

/// The module in which a path's item is, also where modules above it hand it on.
fn home(path: &Module, all: &BTreeMap<Module, String>, handed_on: &BTreeMap<Module, Module>) -> Module {
    let mut path = path.clone();
    for _ in 0..8 {
        match handed_on.get(&path) {
            Some(further) if *further != path => path = further.clone(),
            _ => break,
        }
    }
    while !path.is_empty() && !all.contains_key(&path) {
        path.pop();
    }
    path
}

/// Which modules of one folder import which others of it, by folder. A parent and its children are left out: a folder's `mod.rs` hands on
/// what its files have, and its files share what it has, so that the two are one room with one door.
fn sibling_imports(all: &BTreeMap<Module, String>) -> BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> {
    let imported = |module: &Module, text: &str| -> Vec<Module> {
        let named = uses(text).iter().flat_map(|tree| leaves(tree)).collect::<Vec<_>>();
        named.iter().filter_map(|path| absolute(module, path, all)).collect()
    };
    let paths = |module: &Module, text: &str| -> Vec<Module> {
        let named = uses(text).iter().flat_map(|tree| leaves(tree)).chain(inline_paths(text)).collect::<Vec<_>>();
        named.iter().filter_map(|path| absolute(module, path, all)).collect()
    };
    let mut handed_on = BTreeMap::new();
    for (module, text) in all {
        for path in
            imported(module, text).into_iter().filter(|path| path.len() > module.len() + 1 && path.starts_with(module))
        {
            let name = path.last().cloned().into_iter();
            handed_on.insert(module.iter().cloned().chain(name).collect::<Module>(), path);
        }
    }
    let mut imports: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, text) in all {
        for path in paths(module, text) {
            let to = home(&path, all, &handed_on);
            let common = module.iter().zip(&to).take_while(|(one, other)| one == other).count();
            if common < module.len() && common < to.len() {
                let of_folder = imports.entry(module[..common].to_vec()).or_default();
                of_folder.entry(module[common].clone()).or_default().insert(to[common].clone());
            }
        }
    }
    imports
}

/// The modules of a folder that reach themselves, by the circle that they are in.
fn circles(imports: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<Vec<String>> {
    let reached = |from: &String| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
        while let Some(next) = left.pop() {
            left.extend(imports.get(next).into_iter().flatten().filter(|one| seen.insert((*one).clone())));
        }
        seen
    };
    let reaches: BTreeMap<&String, BTreeSet<String>> = imports.keys().map(|from| (from, reached(from))).collect();
    let in_circle = reaches.iter().filter(|(from, seen)| seen.contains(**from));
    let circle = |(from, seen): (&&String, &BTreeSet<String>)| {
        seen.iter().filter(|one| reaches.get(one).is_some_and(|back| back.contains(*from))).cloned().collect::<Vec<_>>()
    };
    in_circle.map(circle).collect()
}

#[test]
fn modules_of_a_folder_import_each_other_one_way() {
    let mut wrong = Vec::new();
    let mut found = BTreeSet::new();
    for Package { name, sources, .. } in packages() {
        for (folder, imports) in sibling_imports(&modules(&sources)) {
            let folder = [vec![name.clone()], folder].concat().join("::");
            for circle in circles(&imports) {
                let has =
                    |modules: &[&str]| modules.is_empty() || circle.iter().all(|one| modules.contains(&one.as_str()));
                match CIRCLES.iter().position(|(of, modules, _)| *of == folder && has(modules)) {
                    Some(row) => drop(found.insert(row)),
                    None => wrong.push(format!("{folder}: {} import each other", circle.join(", "))),
                }
            }
        }
    }
    let rows = CIRCLES.iter().enumerate().filter(|(row, _)| !found.contains(row));
    let gone = |(_, (folder, modules, _)): (usize, &(&str, &[&str], &str))| {
        format!("{folder}: {} do not import each other: remove the row of CIRCLES", modules.join(", "))
    };
    wrong.extend(rows.map(gone));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_circle_is_found_through_what_a_module_hands_on() {
    let module = |path: &str| path.split("::").filter(|one| !one.is_empty()).map(str::to_owned).collect::<Module>();
    let sources = [
        ("", "mod a;\nmod b;\nmod c;\npub use self::b::B;\nuse std::fmt;\n"),
        ("a", "#[cfg(test)]\nmod tests;\nuse crate::{B, fmt as _};\nuse super::c::deep::C;\n"),
        ("b", "use super::a::{\n    A,\n};\n#[cfg(test)]\nmod tests {\n}\n"),
        ("c", "#[cfg(test)]\nmod tests {\nuse crate::a::A;\n}\n"),
    ];
    let all = sources.map(|(path, text)| (module(path), text.to_owned())).into();
    let imports = sibling_imports(&all);
    assert_eq!(circles(&imports[&Module::new()]), BTreeSet::from([vec!["a".to_owned(), "b".to_owned()]]));
}

#[test]
fn a_circle_of_paths_that_no_use_names_is_found() {
    let module = |path: &str| path.split("::").filter(|one| !one.is_empty()).map(str::to_owned).collect::<Module>();
    let sources = [
        ("", "mod a;\nmod b;\nmod c;\n"),
        ("a", "enum Error {\n    Down(super::b::Phase),\n}\n"),
        ("b", "pub(in crate::c) fn phase() -> Result<Phase, crate::a::Error> {\n    $crate::c::call()\n}\n"),
        (
            "c",
            "// See super::a::Error.\nfn call() -> super::b::Phase {}\n#[cfg(test)]\nmod tests {\n    crate::a::call();\n}\n",
        ),
    ];
    let all = sources.map(|(path, text)| (module(path), text.to_owned())).into();
    let imports = sibling_imports(&all);
    assert_eq!(circles(&imports[&Module::new()]), BTreeSet::from([vec!["a".to_owned(), "b".to_owned()]]));
}
