//! Manifests: one version of packages, crates, chart and images; the chart's sections; the libraries that pods get.

use std::collections::BTreeSet;
use std::fs;

use super::{documents, root};

/// Sections that the chart writes itself, and those that each node has of its own.
const NOT_OF_VALUES: [&str; 6] = ["[service]", "[metrics]", "[[host]]", "[exchange]", "[controller]", "[store]"];
/// Files that name the version, and the line's beginning.
const VERSIONS: [(&str, &str); 6] = [
    ("Cargo.toml", "version = "),
    ("service/kubernetes/Cargo.toml", "version = "),
    ("python/Cargo.toml", "version = "),
    ("python/pyproject.toml", "version = "),
    ("packaging/helm/mccs/Chart.yaml", "version: "),
    ("packaging/helm/mccs/Chart.yaml", "appVersion: "),
];

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn crates_packages_and_chart_have_one_version() {
    for (name, begins) in VERSIONS {
        let text = read(name);
        let said =
            text.lines().find_map(|line| line.strip_prefix(begins)).unwrap_or_else(|| panic!("{name}: no {begins}"));
        assert_eq!(said.trim_matches('"'), env!("CARGO_PKG_VERSION"), "{name}: {begins}");
    }
    // Commands of pages install packages of it.
    let names = ["mccs-service", "libmccs", "libmccs-dev", "mccs-console", "mccs-tools"];
    let mut count = 0;
    for (page, text) in documents().iter().filter(|(page, _)| !page.starts_with("docs/decisions/")) {
        for package in names {
            for rest in
                text.split(&format!("{package}_")).skip(1).filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
            {
                assert!(rest.starts_with(concat!(env!("CARGO_PKG_VERSION"), "_")), "{page}: {package}_{rest:.12}");
                count += 1;
            }
        }
    }
    assert!(count > 0, "no page installs a package");
}

/// By the chart's `mccs.image` alone, whose tag is the values', or else the chart's `appVersion`.
#[test]
fn all_images_of_manifests_are_of_one_version() {
    let folder = root().join("packaging/helm/mccs/templates");
    let mut images = 0;
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        let text = fs::read_to_string(&entry).expect("text");
        for line in text.lines().filter(|line| line.trim_start().trim_start_matches("- ").starts_with("image:")) {
            assert_eq!(line.trim(), "image: {{ include \"mccs.image\" . }}", "{}", entry.display());
            images += 1;
        }
    }
    assert!(images >= 3, "the chart has {images} images");
    let helpers = read("packaging/helm/mccs/templates/_helpers.tpl");
    assert!(helpers.contains("{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"));
    let values = read("packaging/helm/mccs/values.yaml");
    assert!(values.lines().any(|line| line.trim() == "tag: \"\""), "values.yaml has a tag of its own");
    // Manifests of pages name no image of mccs with a tag of another version.
    for (page, text) in documents() {
        for line in text.lines().filter(|line| line.trim_start().starts_with("image:") && line.contains("mccs")) {
            assert!(line.contains(concat!(":", env!("CARGO_PKG_VERSION"))), "{page}: {line}");
        }
    }
}

/// Sections that the chart lets values have are those of service.toml that are the same on all nodes.
#[test]
fn the_charts_sections_are_those_of_service_toml() {
    let helpers = read("packaging/helm/mccs/templates/_helpers.tpl");
    let list = helpers.lines().find(|line| line.contains("$sections := list")).expect("the chart's list");
    let listed: BTreeSet<&str> = list.split('"').skip(1).step_by(2).collect();
    let example = read("config/examples/service.toml");
    // Some are there as comments.
    let headers = example.lines().map(|line| line.trim_start_matches("# ")).filter(|line| line.starts_with('['));
    let headers = headers.filter_map(|line| line.split(['#', ' ']).next()).filter(|header| header.ends_with(']'));
    let wanted: BTreeSet<&str> = headers.filter(|header| !NOT_OF_VALUES.contains(header)).collect();
    assert!(wanted.len() > 8, "{wanted:?}");
    assert_eq!(wanted.difference(&listed).collect::<Vec<_>>(), Vec::<&&str>::new(), "the chart refuses these");
    // Whatever else is listed is a table within one of these.
    let is_within = |header: &&&str| {
        let (parent, _) = header.trim_start_matches('[').rsplit_once('.').unwrap_or_default();
        wanted.iter().any(|wanted| wanted.trim_matches(['[', ']']) == parent)
    };
    assert_eq!(listed.difference(&wanted).filter(|header| !is_within(header)).collect::<Vec<_>>(), Vec::<&&str>::new());
}

/// The device plugin mounts one folder of libraries: whatever jobs link or preload lies there, and leads to nothing outside.
#[test]
fn the_folder_that_pods_get_has_all_libraries() {
    let folder = mccs_config::KubernetesFile::default().library_dir;
    let package = read("packaging/libmccs.yaml");
    for library in ["libmccs.so.${MAJOR}", "libnccl.so.2", "libmscclpp.so"] {
        let wanted = folder.join(library).display().to_string();
        let is_there =
            |line: &&str| line.contains(&format!("dst: {wanted}}}")) || line.contains(&format!("dst: \"{wanted}\"}}"));
        let line = package.lines().find(is_there).unwrap_or_else(|| panic!("the package has no {wanted}"));
        assert!(!line.contains("symlink"), "{line}");
    }
}
