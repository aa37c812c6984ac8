//! `slurm.toml`: which tenant a Slurm job is, by its account and QOS.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::job_terms::JobTerms;
use crate::limits;
use crate::policy::PolicyFile;
use crate::service::{CONTROL_SOCKET, TENANT_SOCKET, TENANTS_FOLDER, TenantConfig};
use crate::units::DurationText;
use crate::validate::{Problems, Validate, nearest};

/// A whole `slurm.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SlurmFile {
    /// The service's `runtime_dir`.
    pub runtime_dir: PathBuf,
    /// What becomes of a job on a host whose service cannot be reached.
    pub without_service: WithoutService,
    /// The library that tasks load before all others. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preload: Option<PathBuf>,
    /// Whether processes must be in the job's cgroup, besides being its user's. Needs Slurm's cgroups (`proctrack/cgroup`).
    pub require_cgroup: bool,
    /// How long the service may take to have a tenant, or to take it away.
    pub timeout: DurationText,
    /// Where it is noted which jobs are refused, for their tasks.
    pub state_dir: PathBuf,
    /// What Slurm is asked by where it does not tell a prolog of account and QOS.
    pub squeue: PathBuf,
    /// By which an epilog notes in Slurm's accounting why the service ended any of a job. Absent: it notes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sacctmgr: Option<PathBuf>,
    /// Jobs of accounts that are not listed. Absent: they are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<JobTerms>,
    /// By account.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub account: BTreeMap<String, JobTerms>,
    /// By QOS: what is said here goes before the account's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub qos: BTreeMap<String, JobTerms>,
}

/// `without_service`: what becomes of a job on a host whose service cannot be reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum WithoutService {
    /// Its prolog fails: Slurm drains the host, and runs the job elsewhere.
    #[default]
    Refuse,
    /// It runs without mccs: by the NCCL that it has.
    Run,
}

/// A job, as Slurm tells of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlurmJob {
    /// Its number.
    pub id: u64,
    /// Number of its user.
    pub uid: u32,
    /// Name of its user, where that is known.
    pub user: Option<String>,
    /// Its account, if it has one.
    pub account: Option<String>,
    /// Its QOS, if it has one.
    pub qos: Option<String>,
}

impl Default for SlurmFile {
    fn default() -> Self {
        SlurmFile {
            runtime_dir: "/run/mccs".into(),
            without_service: WithoutService::default(),
            preload: None,
            require_cgroup: false,
            timeout: DurationText::secs(10),
            state_dir: "/run/mccs-slurm".into(),
            squeue: "/usr/bin/squeue".into(),
            sacctmgr: None,
            default: None,
            account: BTreeMap::new(),
            qos: BTreeMap::new(),
        }
    }
}

crate::document!(SlurmFile, written);

impl SlurmFile {
    /// The service's control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.runtime_dir.join(CONTROL_SOCKET)
    }

    /// The name of a job's tenant.
    #[must_use]
    pub fn tenant_name(id: u64) -> String {
        format!("slurm-{id}")
    }

    /// The folder of a job's tenant.
    #[must_use]
    pub fn tenant_folder(&self, id: u64) -> PathBuf {
        self.runtime_dir.join(TENANTS_FOLDER).join(Self::tenant_name(id))
    }

    /// Where a job's tasks connect.
    #[must_use]
    pub fn tenant_socket(&self, id: u64) -> PathBuf {
        self.tenant_folder(id).join(TENANT_SOCKET)
    }

    /// Where it is noted why a job is refused.
    #[must_use]
    pub fn refusal(&self, id: u64) -> PathBuf {
        self.state_dir.join(format!("{id}.refused"))
    }

    /// The tenants of `policy.toml` that this file names, each with the key that does: an account without `tenant` names its own.
    fn rules(&self) -> impl Iterator<Item = (String, &str)> {
        let default =
            self.default.iter().filter_map(|terms| Some(("default.tenant".to_owned(), terms.tenant.as_deref()?)));
        let accounts = self.account.iter().map(|(account, terms)| match &terms.tenant {
            Some(tenant) => (format!("account.{account}.tenant"), tenant.as_str()),
            None => (format!("account.{account}"), account.as_str()),
        });
        let qos =
            self.qos.iter().filter_map(|(qos, terms)| Some((format!("qos.{qos}.tenant"), terms.tenant.as_deref()?)));
        default.chain(accounts).chain(qos)
    }

    /// Tenants here that a policy says nothing about, in words: they may be mistyped. Nothing, if the policy names no tenant at all.
    #[must_use]
    pub fn strangers(&self, policy: &PolicyFile) -> Vec<String> {
        let known: BTreeSet<&str> = policy.tenants_named().collect();
        let unknown = self.rules().filter(|(_, tenant)| !known.is_empty() && !known.contains(tenant));
        let warning = |(key, tenant): (String, &str)| {
            let meant = nearest(tenant, known.iter().copied()).map(|known| format!("; did you mean {known:?}?"));
            format!("{key}: the policy says nothing about tenant {tenant:?}{}", meant.unwrap_or_default())
        };
        unknown.map(warning).collect()
    }

    /// The tenant that a job is.
    ///
    /// # Errors
    /// Why it is none: nothing here says what jobs of its account are.
    pub fn tenant(&self, job: &SlurmJob) -> Result<TenantConfig, String> {
        let of_account = job.account.as_ref().and_then(|account| self.account.get(account));
        let terms = of_account.or(self.default.as_ref()).ok_or_else(|| match &job.account {
            Some(account) => format!("slurm.toml has nothing about account {account:?}, and no [default]"),
            None => "the job has no account, and slurm.toml no [default]".to_owned(),
        })?;
        let own = job.account.as_ref().filter(|_| of_account.is_some());
        let of_qos = job.qos.as_ref().and_then(|qos| self.qos.get(qos));
        let terms = of_qos.map_or_else(|| terms.clone(), |of_qos| of_qos.before(terms));
        let labels = [
            ("job", Some(job.id.to_string())),
            ("user", job.user.clone()),
            ("account", job.account.clone()),
            ("qos", job.qos.clone()),
        ];
        let labels = labels.into_iter().filter_map(|(label, value)| Some((label.to_owned(), value?)));
        let tenant = terms.tenant_called(Self::tenant_name(job.id));
        Ok(TenantConfig {
            uids: Some(vec![job.uid]),
            rules: tenant.rules.or(own.cloned()),
            cgroup: self.require_cgroup.then(|| format!("job_{}", job.id)),
            labels: labels.collect(),
            ..tenant
        })
    }
}

impl Validate for SlurmFile {
    fn validate(&self, problems: &mut Problems) {
        let paths = [
            ("runtime_dir", Some(&self.runtime_dir)),
            ("state_dir", Some(&self.state_dir)),
            ("preload", self.preload.as_ref()),
            ("squeue", Some(&self.squeue)),
            ("sacctmgr", self.sacctmgr.as_ref()),
        ];
        for (key, path) in paths {
            if let Some(path) = path.filter(|path| !path.is_absolute()) {
                problems.add(key, format!("must be an absolute path, not {:?}", path.display()));
            }
        }
        problems.within("timeout", &self.timeout, &limits::SCHEDULER_TIMEOUT);
        if let Some(terms) = &self.default {
            terms.validate_at("default", problems);
            if terms.tenant.is_none() {
                problems.add("default", "tenant is missing: jobs of any account are of the same tenant of policy.toml");
            }
        }
        if self.default.is_none() && self.account.is_empty() {
            problems.add("default", "there is neither [default] nor an [account.NAME]: every job would be refused");
        }
        for (account, terms) in &self.account {
            terms.validate_at(&format!("account.{account}"), problems);
            if terms.tenant.is_none() {
                // Accounts may have names that tenants have not.
                problems.name(format!("account.{account}"), account);
            }
        }
        self.qos.iter().for_each(|(qos, terms)| terms.validate_at(&format!("qos.{qos}"), problems));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    fn example() -> SlurmFile {
        SlurmFile::parse(include_str!("../examples/slurm.toml"), "slurm.toml").expect("right")
    }

    fn job(account: Option<&str>, qos: Option<&str>) -> SlurmJob {
        let (account, qos) = (account.map(str::to_owned), qos.map(str::to_owned));
        SlurmJob { id: 4711, uid: 1000, user: Some("ada".into()), account, qos }
    }

    #[test]
    fn the_example_reads_back() {
        let file = example();
        assert_eq!(SlurmFile::parse(&file.to_toml(), "slurm.toml").expect("right"), file);
    }

    #[test]
    fn a_job_is_what_its_account_says_and_its_qos_goes_before() {
        let file = example();
        let tenant = file.tenant(&job(Some("physics"), None)).expect("a tenant");
        assert_eq!((tenant.name.as_str(), tenant.rules.as_deref(), tenant.weight), ("slurm-4711", Some("physics"), 2));
        assert_eq!((tenant.uids, tenant.max_memory), (Some(vec![1000]), Some(Bytes::gib(64))));
        let labels = [("account", "physics"), ("job", "4711"), ("user", "ada")];
        assert!(tenant.labels.iter().map(|(label, value)| (label.as_str(), value.as_str())).eq(labels));
        let urgent = file.tenant(&job(Some("physics"), Some("urgent"))).expect("a tenant");
        assert_eq!(
            (urgent.weight, urgent.max_memory, urgent.rules.as_deref()),
            (10, Some(Bytes::gib(64)), Some("physics"))
        );
        assert_eq!(urgent.labels["qos"], "urgent");
        let other = file.tenant(&job(Some("chemistry"), Some("normal"))).expect("a tenant");
        assert_eq!((other.rules.as_deref(), other.weight), (Some("batch"), 1), "as [default] says");
        assert_eq!(file.tenant(&job(None, None)).expect("a tenant").rules.as_deref(), Some("batch"));
    }

    #[test]
    fn a_job_of_an_unknown_account_is_refused_where_there_is_no_default() {
        let file = SlurmFile { default: None, ..example() };
        let why = file.tenant(&job(Some("chemistry"), None)).expect_err("unknown");
        assert!(why.contains("nothing about account \"chemistry\""), "{why}");
        assert!(file.tenant(&job(None, Some("urgent"))).expect_err("none").contains("no account"));
    }

    #[test]
    fn tenants_that_a_policy_does_not_name_are_told() {
        let text = "[default]\ntenant = \"bacth\"\n[account.physics]\n[account.biology]\ntenant = \"life\"\n[qos.urgent]\ntenant = \"x\"\n";
        let file = SlurmFile::parse(text, "slurm.toml").expect("right");
        let policy = |text: &str| PolicyFile::parse(text, "policy.toml").expect("right");
        let named = policy(
            "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"batch\"\n[[tenant]]\nname = \"physics\"\n[[tenant]]\nname = \"live\"\n",
        );
        assert_eq!(
            file.strangers(&named),
            [
                "default.tenant: the policy says nothing about tenant \"bacth\"; did you mean \"batch\"?",
                "account.biology.tenant: the policy says nothing about tenant \"life\"; did you mean \"live\"?",
                "qos.urgent.tenant: the policy says nothing about tenant \"x\"",
            ]
        );
        assert_eq!(file.strangers(&policy("[policy]\nname = \"ffa\"\n")), Vec::<String>::new());
    }

    #[test]
    fn a_job_is_in_its_cgroup_where_the_operator_wants_that() {
        let file = SlurmFile { require_cgroup: true, ..example() };
        assert_eq!(file.tenant(&job(None, None)).expect("a tenant").cgroup.as_deref(), Some("job_4711"));
    }

    #[test]
    fn mistakes_have_a_line_and_a_reason() {
        for (text, says) in [
            ("preload = \"a.so\"\n[default]\ntenant = \"a\"\n", "1:1: preload: must be an absolute path"),
            ("sacctmgr = \"sacctmgr\"\n[default]\ntenant = \"a\"\n", "1:1: sacctmgr: must be an absolute path"),
            ("squeue = \"squeue\"\n[default]\ntenant = \"a\"\n", "1:1: squeue: must be an absolute path"),
            ("[default]\nweight = 2\n", "tenant is missing"),
            ("timeout = \"1s\"\n", "neither [default] nor an [account.NAME]"),
            ("[account.physics]\nweight = 0\n", "2:1: account.physics.weight: must be from 1 to 100"),
            ("[account.\"a b\"]\n", "a name has"),
            ("[account.\"a b\"]\ntenant = \"c d\"\n", "a name has"),
            ("[acount.physics]\n", "did you mean `account`?"),
            ("[default]\ntenant = \"a\"\nwieght = 1\n", "did you mean `weight`?"),
            ("without_service = \"ignore\"\n", "without_service"),
        ] {
            let why = SlurmFile::parse(text, "slurm.toml").expect_err(text).to_string();
            assert!(why.contains(says), "{text}: {why}");
        }
    }
}
