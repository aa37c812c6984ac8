//! Services of the neighbours' benchmark, with a victim and a hostile tenant: one, or two that know
//! each other.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use super::children::Process;

const TENANTS: &str =
    "[[tenant]]\nname = \"victim\"\nsocket = \"victim\"\n[[tenant]]\nname = \"hostile\"\nsocket = \"hostile\"\n";
/// Port of the first host; the next one has the next.
const PORT: u16 = 7480;

/// Ended with the value.
pub struct Services {
    processes: Vec<Process>,
    folder: PathBuf,
}

fn program(name: &str) -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name(name);
    ensure!(program.exists(), "{} is missing: cargo build --release --workspace --bins", program.display());
    Ok(program)
}

impl Services {
    /// Starts so many.
    ///
    /// # Errors
    /// One does not start.
    pub fn start(hosts: usize) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("mccs-neighbours-{}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut services = Services { processes: Vec::new(), folder };
        let names: Vec<_> = (0..hosts).map(|host| format!("h{host}")).collect();
        if hosts > 1 {
            let mut keys = Command::new(program("mccsctl")?);
            keys.args(["keys", "--hosts", &names.join(","), "--dir"]).arg(&services.folder).stdout(Stdio::null());
            ensure!(keys.status()?.success(), "mccsctl makes no keys");
        }
        for host in 0..hosts {
            services.start_one(host, &names)?;
        }
        Ok(services)
    }

    fn start_one(&mut self, host: usize, names: &[String]) -> anyhow::Result<()> {
        let (own, name) = (self.folder.join(&names[host]), &names[host]);
        std::fs::create_dir(&own)?;
        let exchange = if names.len() > 1 { self.exchange(host, names) } else { String::new() };
        let head = format!("[service]\nname = {name:?}\nruntime_dir = {own:?}\n[cuda]\nuse = \"off\"\n");
        let config = own.join("service.toml");
        std::fs::write(&config, format!("{head}{TENANTS}{exchange}"))?;
        let mut command = Command::new(program("mccs-service")?);
        command.arg("--config").arg(&config).env("RUST_LOG", "error").stdout(Stdio::piped());
        let mut process = Process::start(&mut command)?;
        let said = process.0.stdout.take().and_then(|stdout| BufReader::new(stdout).lines().next());
        self.processes.push(process);
        ensure!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))), "{name} does not start");
        Ok(())
    }

    fn exchange(&self, host: usize, names: &[String]) -> String {
        let (folder, name) = (self.folder.display(), &names[host]);
        let address = |host: usize| format!("127.0.0.1:{}", PORT + host as u16);
        let own = format!(
            "[exchange]\nlisten = \"{}\"\ncertificate = \"{folder}/{name}.crt\"\nkey = \"{folder}/{name}.key\"\n\
             authority = \"{folder}/authority.crt\"\n",
            address(host)
        );
        let all =
            (0..names.len()).map(|at| format!("[[host]]\nname = {:?}\naddress = \"{}\"\n", names[at], address(at)));
        own + &all.collect::<String>()
    }

    /// A tenant's socket on a host.
    #[must_use]
    pub fn socket(&self, host: usize, tenant: &str) -> PathBuf {
        self.folder.join(format!("h{host}")).join(tenant)
    }

    /// Folder of the services' files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        self.processes.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
