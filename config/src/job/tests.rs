use super::*;
use crate::error::Diagnostic;

const JOB: &str = "[[job]]\nname = \"a\"\nranks = 2\ncommand = [\"true\"]\n";

fn refused(text: &str) -> Vec<Diagnostic> {
    let error = JobFile::parse(text, "job.toml").expect_err("the file is wrong");
    error.diagnostics().to_vec()
}

fn only(text: &str, line: usize, key: &str, part: &str) {
    let all = refused(text);
    assert_eq!(all.len(), 1, "{all:?}");
    let found = &all[0];
    assert_eq!((found.line, found.key.as_str()), (line, key), "{found}");
    assert!(found.message.contains(part), "{found}");
}

#[test]
fn a_job_needs_a_name_ranks_and_a_command() {
    let file = JobFile::parse(JOB, "jobs/job.toml").unwrap();
    assert_eq!(file.jobs[0].tenant(), "a");
    assert!(file.service.start);
    assert_eq!(file.directory, Path::new("jobs"));
    only("[[job]]\nname = \"a\"\nranks = 1\n", 1, "job[0]", "missing field `command`");
    only("", 1, "", "missing field `job`");
    only("job = []\n", 1, "job", "from 1");
}

#[test]
fn the_example_is_read() {
    let text = include_str!("../../examples/job.toml");
    let file = JobFile::parse(text, "job.toml").unwrap();
    assert_eq!(file.jobs.len(), 2);
    assert_eq!(file.run.operator.len(), 2);
    let config = file.service_config(0, &file.hosts()[0], Path::new("/run/p")).unwrap();
    assert_eq!(config.tenants[0].max_memory.map(|bytes| bytes.0), Some(1 << 30));
}

#[test]
fn the_example_with_hosts_says_every_key_of_them() {
    let text = include_str!("../../examples/job-hosts.toml");
    let file = JobFile::parse(text, "job.toml").unwrap();
    let places = file.jobs[0].places(&file.hosts()).unwrap();
    assert_eq!(
        places.iter().map(|place| (place.host, place.device)).collect::<Vec<_>>(),
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    );
    let keys = [
        "name",
        "ssh",
        "ssh_options",
        "fabric",
        "node",
        "namespace",
        "agent",
        "runtime_parent",
        "address",
        "port",
        "devices",
        "env",
        "values",
    ];
    for key in keys {
        assert!(text.contains(&format!("\n{key} = ")), "{key}");
    }
}

#[test]
fn mistakes_in_a_job_get_their_line() {
    only(&format!("{JOB}strat = 1\n"), 5, "job[0].strat", "did you mean `start`?");
    only(&JOB.replace("ranks = 2\n", ""), 1, "job[0]", "missing `ranks`");
    only(&JOB.replace("= 2", "= 0"), 3, "job[0].ranks", "from 1 to 4096");
    only(&JOB.replace("\"true\"", ""), 4, "job[0].command", "is empty");
    only(&JOB.replace("\"a\"", "\"a/b\""), 2, "job[0].name", "\"a/b\"");
    only(&format!("{JOB}timeout = \"0\"\n"), 5, "job[0].timeout", "from 1ms");
    only(&format!("{JOB}[job.env]\nMCCS_RANK = \"1\"\n"), 6, "job[0].env.MCCS_RANK", "launcher");
    only(&format!("{JOB}{JOB}"), 6, "job[1].name", "job[0]");
}

#[test]
fn mistakes_in_the_nested_service_file_get_their_line() {
    let with = |text: &str| format!("{text}\n{JOB}");
    only(&with("[service.config.strategy]\nchannels = 0"), 2, "service.config.strategy.channels", "from 1 to 64");
    only(&with("[service.config.stratgy]"), 1, "service.config.stratgy", "did you mean `strategy`?");
    only(
        &with("[service.config.service]\nruntime_dir = \"/run/x\""),
        2,
        "service.config.service.runtime_dir",
        "chosen by the launcher",
    );
    let two = "[[service.config.tenant]]\nname = \"a\"\n[[service.config.tenant]]\nname = \"b\"";
    JobFile::parse(&with(two), "job.toml").unwrap();
}

#[test]
fn a_running_service_needs_its_file() {
    only(&format!("[service]\nstart = false\n{JOB}"), 2, "service.start", "config_file");
    let text = format!("[service]\nconfig_file = \"x\"\n[service.config]\n{JOB}");
    only(&text, 3, "service.config", "keep one");
}

const HOSTS: &str = "[[host]]\nname = \"h0\"\naddress = \"10.0.0.1\"\nport = 7000\ndevices = 2\n\
                     [[host]]\nname = \"h1\"\nfabric = \"testbed\"\n";

fn places(job: &str) -> String {
    let file = JobFile::parse(&format!("{HOSTS}[[job]]\nname = \"a\"\ncommand = [\"true\"]\n{job}"), "j").unwrap();
    let places = file.jobs[0].places(&file.hosts()).unwrap();
    places.iter().map(|place| format!("{}:{}", place.host, place.device)).collect::<Vec<_>>().join(" ")
}

#[test]
fn ranks_go_where_the_file_says() {
    assert_eq!(places("ranks = 4"), "0:0 0:1 1:0 1:0");
    assert_eq!(places("ranks = 4\nplacement = \"round_robin\""), "0:0 1:0 0:1 1:0");
    assert_eq!(places("ranks = 2\nhosts = [\"h1\"]"), "1:0 1:0");
    assert_eq!(places("place = [\"h1\", \"h0:1\", \"h0:1\"]"), "1:0 0:1 0:1");
    assert_eq!(JobFile::parse(JOB, "j").unwrap().jobs[0].places(&[Host::local()]).unwrap().len(), 2);
}

#[test]
fn mistakes_in_a_placement_get_their_line_and_a_suggestion() {
    let with = |more: &str| format!("{HOSTS}[[job]]\nname = \"a\"\ncommand = [\"true\"]\n{more}");
    let at = 12;
    only(&with("place = [\"h0\", \"h2\"]"), at, "job[0].place[1]", "there is no host \"h2\"; did you mean \"h0\"?");
    only(&with("place = [\"h0:2\"]"), at, "job[0].place[0]", "no device 2: it has 0 to 1");
    only(&with("place = [\"h1:1\"]"), at, "job[0].place[0]", "it says no `devices = 2`");
    only(&with("place = [\"h0:x\"]"), at, "job[0].place[0]", "neither");
    only(&with("ranks = 3\nplace = [\"h0\"]"), at, "job[0].ranks", "place names 1");
    only(&with("ranks = 3\nhosts = [\"h0\"]"), at, "job[0].ranks", "have 2 devices");
    only(&with("ranks = 1\nhosts = [\"h0\",\n\"hh1\"]"), at + 2, "job[0].hosts[1]", "did you mean \"h1\"?");
    only(&with("ranks = 1\nhosts = [\"zebra\"]"), at + 1, "job[0].hosts[0]", "there are h0, h1");
    only(&with("ranks = 1\nplacement = \"rond_robin\""), at + 1, "job[0].placement", "did you mean `round_robin`?");
    let view = "ranks = 1\n[[run.operator]]\ncommand = [\"x\"]\nhost = \"h3\"";
    only(&with(view), at + 3, "run.operator[0].host", "did you mean");
}

#[test]
fn mistakes_in_a_host_get_their_line() {
    let with = |more: &str| format!("{JOB}[[host]]\nname = \"h\"\n{more}");
    only(&with("address = \"x\"\n[[host]]\nname = \"h\""), 9, "host[1].name", "host[0]");
    only(&with("address = \"x\"\nssh = \"n\"\nfabric = \"f\""), 9, "host[0].fabric", "stands beside host[0].ssh");
    only(&with("ssh = \"-oProxyCommand=x\""), 7, "host[0].ssh", "destination");
    only(&with("ssh_options = [\"-v\"]"), 7, "host[0].ssh_options", "without ssh");
    only(&with("node = \"h0\""), 7, "host[0].node", "without fabric");
    only(&with("namespace = \"../x\""), 7, "host[0].namespace", "a name");
    only(&with("devices = 0"), 7, "host[0].devices", "from 1 to 64");
    only(&with("values = { port = \"1\" }"), 7, "host[0].values.port", "given by the launcher");
    only(&with("values = { key = 'a\"b' }"), 7, "host[0].values.key", "no quotes");
    only(&with("env = { MCCS_HOST = \"x\" }"), 7, "host[0].env.MCCS_HOST", "launcher");
}

#[test]
fn a_job_follows_one_above_it() {
    let second = "[[job]]\nname = \"b\"\nranks = 1\ncommand = [\"true\"]\nstart = \"5s\"\n";
    let file = JobFile::parse(&format!("{JOB}{second}after = \"a\"\n"), "j").unwrap();
    assert_eq!(file.jobs[1].start, DurationText::secs(5));
    only(&format!("{JOB}{second}after = \"c\"\n"), 10, "job[1].after", "there is no job \"c\"; did you mean \"a\"?");
    only(&format!("{JOB}after = \"b\"\n{second}"), 5, "job[0].after", "above");
    only(&format!("{JOB}after = \"a\"\n"), 5, "job[0].after", "above");
    assert_eq!(JobFile::parse(&format!("{JOB}start_after = \"1s\""), "j").unwrap().jobs[0].start.0.as_secs(), 1);
}

#[test]
fn each_host_gets_its_own_service_configuration() {
    let config = "[service.config.service]\nname = \"mccs-{host}\"\ncontrol_socket = \"c-{port}-{key}.sock\"\n";
    let one = HOSTS.replace("devices = 2", "devices = 2\nvalues = { key = \"k0\" }");
    let text = format!("{JOB}{config}{}port = 1\nvalues = {{ key = \"k1\" }}\n", one);
    let file = JobFile::parse(&text, "j").unwrap();
    let hosts = file.hosts();
    let of = |i: usize| file.service_config(i, &hosts[i], Path::new("/run/p")).unwrap().service;
    assert_eq!(of(0).name.unwrap(), "mccs-h0");
    assert_eq!(of(1).control_socket.unwrap(), Path::new("c-1-k1.sock"));
    only(&text.replace("mccs-{host}", "mccs-{host"), 6, "service.config.service.name", "a name");
    let without = text.replace("{ key = \"k1\" }", "{ kei = \"k1\" }");
    only(&without, 7, "", "host \"h1\" has no {key}; did you mean {kei}?");
}
