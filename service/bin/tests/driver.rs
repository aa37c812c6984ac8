//! CUDA drivers that are no good, and GPUs that do not work: what the service says at start, and that it starts, unless GPUs are required. The
//! driver is a stub (`programs/libcuda.c`), compiled for each test.

#[allow(dead_code, reason = "the other tests of programs need more of it")]
mod programs;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use self::programs::{make_driver, mccsctl, watchdog};

/// A service's host, with its driver.
struct Host {
    folder: tempfile::TempDir,
}

/// Output of a service, and whether it started.
struct Said {
    log: String,
    is_ready: bool,
}

impl Host {
    /// With a driver made so.
    fn with_driver(definitions: &[&str]) -> Self {
        let host = Host { folder: tempfile::tempdir().expect("a directory") };
        make_driver(host.folder.path(), definitions);
        host
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn service(&self, cuda: &str) -> Command {
        watchdog();
        let config = format!(
            "[service]\nname = \"h0\"\nruntime_dir = {:?}\n[[tenant]]\nname = \"t\"\nsocket = \"t\"\n[cuda]\n{cuda}\n",
            self.folder.path()
        );
        std::fs::write(self.at("service.toml"), config).expect("a file");
        let mut service = Command::new(env!("CARGO_BIN_EXE_mccs-service"));
        service.arg("--config").arg(self.at("service.toml")).env("LD_LIBRARY_PATH", self.folder.path());
        service.env("MCCS_TEST_SAID", self.at("said")).env_remove("CUDA_MPS_PIPE_DIRECTORY");
        service.env("RUST_LOG", "info").stdout(Stdio::piped()).stderr(Stdio::piped());
        service
    }

    /// Starts a service, and ends it when it is ready, after `meanwhile`.
    fn starts(&self, cuda: &str, meanwhile: impl FnOnce()) -> Said {
        self.runs(self.service(cuda), meanwhile)
    }

    fn runs(&self, mut service: Command, meanwhile: impl FnOnce()) -> Said {
        let mut process = service.spawn().expect("starts");
        let said = BufReader::new(process.stdout.take().expect("piped")).lines().next();
        let is_ready = said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready")));
        if is_ready {
            meanwhile();
            process.kill().expect("killed");
        }
        let mut log = String::new();
        process.stderr.take().expect("piped").read_to_string(&mut log).expect("text");
        let status = process.wait().expect("ended");
        assert_eq!(status.code().is_none(), is_ready, "{log}");
        Said { log, is_ready }
    }

    /// A fault of the driver is one line, and the service starts; if GPUs are required it ends, with the same line.
    fn says(&self, what: &str) {
        let said = self.starts("use = \"auto\"", || ());
        let lines = said.log.lines().filter(|line| line.contains(what)).count();
        assert!(said.is_ready && lines == 1, "{}", said.log);
        let said = self.starts("use = \"required\"", || ());
        assert!(!said.is_ready && said.log.contains("use = \"required\"") && said.log.contains(what), "{}", said.log);
        let said = self.starts("use = \"off\"", || ());
        assert!(said.is_ready && !said.log.contains(what), "{}", said.log);
    }
}

#[test]
fn a_driver_that_is_too_old_is_told_of() {
    let host = Host::with_driver(&["DRIVER_VERSION=12020", "INIT=0", "GPUS=1"]);
    host.says("the CUDA driver supports CUDA 12.2; 12.4 or newer is needed");
}

#[test]
fn a_driver_that_does_not_start_is_told_of_with_its_own_word_for_it() {
    let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=802", "GPUS=1"]);
    host.says("the CUDA driver does not start: cuInit: CUDA_ERROR_SYSTEM_NOT_READY (802)");
}

#[test]
fn a_driver_without_something_is_told_of() {
    let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=1", "LACKS_ONE"]);
    host.says("the CUDA driver lacks cuFuncLoad");
}

#[test]
fn a_host_without_a_gpu_is_told_of() {
    let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=0"]);
    host.says("the CUDA driver shows no GPU");
}

#[test]
fn a_library_that_is_no_driver_is_none() {
    let host = Host { folder: tempfile::tempdir().expect("a directory") };
    // Found before any other of the name.
    std::fs::write(host.at("nothing.c"), "int nothing;").expect("a file");
    let (source, library) = (host.at("nothing.c"), host.at("libcuda.so"));
    let compiled = Command::new("cc").args(["-shared", "-o"]).arg(library).arg(source).status().expect("a C compiler");
    assert!(compiled.success());
    host.says("the CUDA driver lacks cuInit: it is too old, or no driver");
}

#[test]
fn gpus_of_which_none_works_are_told_of() {
    let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=1", "BROKEN=0"]);
    host.says("no GPU works: GPU GPU-10101010-1010-1010-1010-101010101010 (0000:07:00.0)");
}

/// The second of two GPUs does not work: in both ways that this can be.
#[test]
fn a_gpu_that_does_not_work_is_left_out_and_the_others_are_used() {
    for (how, name) in [("MUTE=1", "GPU 1, as the driver counts"), ("BROKEN=1", "GPU GPU-11111111-1111")] {
        let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=2", how]);
        let (mut shown, is_built) = (String::new(), mccs_kernels::cuda::IMAGE.is_some());
        let said = host.starts("use = \"auto\"", || {
            let told = mccsctl().arg("--socket").arg(host.at("mccs-control.sock")).arg("gpus").output().expect("runs");
            shown = String::from_utf8(told.stdout).expect("text");
        });
        assert!(said.is_ready && said.log.contains("CUDA_ERROR_ECC_UNCORRECTABLE (214)"), "{}", said.log);
        assert_eq!(said.log.lines().filter(|line| line.contains(name)).count(), 1, "{}", said.log);
        // Without kernels there is nothing to use the other for, which is said as well.
        assert_eq!(shown.contains("GPU-10101010-1010"), is_built, "{shown}");
        assert_eq!(said.log.contains("this binary was built without CUDA kernels"), !is_built, "{}", said.log);
        // Required, and by name: then it must be there.
        let both = "use = \"required\"\ngpus = [\"0000:07:00.0\", \"0000:17:00.0\"]";
        let said = host.starts(both, || ());
        assert!(!said.is_ready && said.log.contains("use = \"required\""), "{}", said.log);
        assert_eq!(host.starts("use = \"required\"", || ()).is_ready, is_built);
    }
}

#[test]
fn one_gpu_under_two_names_is_refused_with_both() {
    let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=2"]);
    let said = host.starts("use = \"auto\"\ngpus = [\"17:00.0\", \"GPU-11111111-1111-1111-1111-111111111111\"]", || ());
    let both = "names \"17:00.0\" and \"GPU-11111111-1111-1111-1111-111111111111\", which are the same GPU";
    assert!(!said.is_ready && said.log.contains(both), "{}", said.log);
}

/// The second of two GPUs does not answer, and tells its bus id all the same, but no UUID.
#[test]
fn a_name_that_is_no_gpus_is_not_taken_for_one_that_does_not_answer() {
    let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=2", "MUTE=1"]);
    let with = |name: &str| host.starts(&format!("use = \"auto\"\ngpus = [\"07:00.0\", {name:?}]"), || ());
    let said = with("17:00.0");
    assert!(said.is_ready && said.log.contains("GPU 17:00.0 does not answer"), "{}", said.log);
    let said = with("17:01.0");
    let what = "[cuda] gpus names \"17:01.0\", which is none of this host's GPUs";
    assert!(!said.is_ready && said.log.contains(what), "{}", said.log);
    // It may be.
    let said = with("GPU-11111111-1111-1111-1111-111111111111");
    assert!(said.is_ready && said.log.contains("or [cuda] gpus has a wrong name"), "{}", said.log);
}

/// The second of two GPUs does not run the kernels: in both ways that this can be. Found at start, and not by every tenant.
#[test]
fn a_gpu_that_does_not_run_the_kernels_is_left_out_and_required_ones_are_refused() {
    let is_built = mccs_kernels::cuda::IMAGE.is_some();
    for (how, what) in [
        ("OLD", "compute capability 7.5; 8.0 or newer is needed"),
        ("UNLOADABLE", "it does not load the kernels: cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209)"),
    ] {
        let named = format!("GPU GPU-11111111-1111-1111-1111-111111111111 (0000:17:00.0): {what}");
        let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=2", &format!("{how}=1")]);
        let said = host.starts("use = \"auto\"", || ());
        // Without kernels no GPU is of use, which is what is said.
        assert!(said.is_ready && said.log.contains(&named) == is_built, "{}", said.log);
        assert_eq!(said.log.contains("this binary was built without CUDA kernels"), !is_built, "{}", said.log);
        // Alone, it is none.
        let alone = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=1", &format!("{how}=0")]);
        let named = format!("no GPU works: GPU GPU-10101010-1010-1010-1010-101010101010 (0000:07:00.0): {what}");
        alone.says(if is_built { &named } else { "this binary was built without CUDA kernels" });
        let said = host.starts("use = \"required\"\ngpus = [\"0000:07:00.0\", \"0000:17:00.0\"]", || ());
        assert!(!said.is_ready && said.log.contains("use = \"required\""), "{}", said.log);
        assert!(!is_built || said.log.contains(what), "{}", said.log);
    }
}

#[test]
fn the_service_is_no_client_of_an_mps_server_unless_it_is_told_to_be() {
    let host = Host::with_driver(&["DRIVER_VERSION=13000", "INIT=0", "GPUS=0"]);
    let folder = || std::fs::read_to_string(host.at("said")).expect("the driver was asked");
    let said = host.starts("", || ());
    assert!(!said.log.contains("MPS"), "{}", said.log);
    let at = PathBuf::from(folder());
    assert!(at.starts_with(host.folder.path()) && !at.exists(), "{}: nobody serves there", at.display());
    let mut service = host.service("");
    service.env("CUDA_MPS_PIPE_DIRECTORY", "/of/the/operator");
    let said = host.runs(service, || ());
    assert_eq!(folder(), "/of/the/operator");
    // Then it falls with the others, which is said.
    assert_eq!(said.log.lines().filter(|line| line.contains("MPS")).count(), 1, "{}", said.log);
    let mut off = host.service("use = \"off\"");
    off.env("CUDA_MPS_PIPE_DIRECTORY", "/of/the/operator");
    let said = host.runs(off, || ());
    assert!(!said.log.contains("MPS"), "{}", said.log);
}
