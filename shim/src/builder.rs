//! Builder of communicators: options, time-out and join of a rank.

use std::fmt::Display;
use std::str::FromStr;
use std::time::{Duration, Instant};

use mccs_ipc::device_initiated::GpuUuid;
use mccs_ipc::protocol::{JoinOptions, Request, Role};
use mccs_ipc::types::UniqueId;
use mccs_rails::Forks;

use crate::{Client, Communicator, Error, job};

/// A rank that is about to join a communicator; see [`Client::communicator`].
///
/// ```no_run
/// # fn main() -> Result<(), mccs::Error> {
/// # let client = mccs::Client::connect("/run/mccs/mccs.sock")?;
/// # let (id, rank, nranks) = (mccs::unique_id()?, 0, 2);
/// let comm = client
///     .communicator(id, rank, nranks)
///     .name("data parallel")
///     .timeout(std::time::Duration::from_secs(60))
///     .join()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct CommunicatorBuilder {
    pub(crate) client: Client,
    pub(crate) id: UniqueId,
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
    pub(crate) root_address: Option<String>,
    pub(crate) options: JoinOptions,
    pub(crate) timeout: Option<Duration>,
    /// Which calls of GPUs of several hosts have several streams.
    pub(crate) forks: Forks,
}

/// A join that the service was asked for.
pub(crate) struct Joining {
    /// The request's number.
    pub(crate) request: u64,
    /// When the caller gives it up.
    pub(crate) deadline: Option<Instant>,
}

impl std::fmt::Debug for CommunicatorBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CommunicatorBuilder { id, rank, nranks, .. } = self;
        let builder = &mut f.debug_struct("CommunicatorBuilder");
        builder.field("id", id).field("rank", rank).field("nranks", nranks).finish_non_exhaustive()
    }
}

/// The value of an environment variable.
fn variable<T: FromStr<Err: Display>>(name: &str) -> Result<T, Error> {
    let value = std::env::var(name).map_err(|error| Error::argument(format!("{name}: {error}")))?;
    value.parse().map_err(|error| Error::argument(format!("{name} is {value:?}: {error}")))
}

impl CommunicatorBuilder {
    pub(crate) fn new(client: &Client, id: UniqueId, rank: u32, nranks: u32) -> Self {
        let (client, options) = (client.clone(), JoinOptions { job: job::of_environment(), ..JoinOptions::default() });
        let forks = Forks::WhereItPays;
        CommunicatorBuilder { client, id, rank, nranks, root_address: None, options, timeout: None, forks }
    }

    /// Address of rank 0, if ranks are at several services: what [`Client::root_address`] returns there. Without it all ranks are
    /// at this service. All ranks give the same. An empty one is no address: the join ends with [`Error::InvalidArgument`].
    pub fn root_address<'a>(mut self, address: impl Into<Option<&'a str>>) -> Self {
        self.root_address = address.into().map(str::to_owned);
        self
    }

    /// As [`CommunicatorBuilder::root_address`], from where an empty text stands for none: variables of the environment, and ids of
    /// other libraries with room for an address.
    #[doc(hidden)]
    pub fn root_address_or_empty(self, address: &str) -> Self {
        self.root_address(Some(address).filter(|address| !address.is_empty()))
    }

    /// Rank, number of ranks, id and root address from the environment, as `mccs-launch` sets it: `MCCS_RANK`, `MCCS_NRANKS`,
    /// `MCCS_UNIQUE_ID`, and `MCCS_ROOT_ADDRESS` where ranks are at several services, which is unset or empty where they are not.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names the variable that is missing or makes no sense.
    pub fn from_env(client: &Client) -> Result<Self, Error> {
        let id = variable::<UniqueId>("MCCS_UNIQUE_ID")?;
        let builder = client.communicator(id, variable("MCCS_RANK")?, variable("MCCS_NRANKS")?);
        Ok(builder.root_address_or_empty(&std::env::var("MCCS_ROOT_ADDRESS").unwrap_or_default()))
    }

    /// A name that `mccsctl`, metrics and error messages show. Control characters become spaces, and what is longer than 64 bytes is
    /// cut.
    pub fn name(mut self, name: &str) -> Self {
        self.options.name = JoinOptions::name_of(name);
        self
    }

    /// Traffic class of packets to other hosts, as in the IP header: the code point in the upper six bits. The operator says which
    /// are allowed; others are dropped.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.options.traffic_class = Some(class);
        self
    }

    /// The job that it is part of, as operators see it; cut as a name is. Without it the environment says: `MCCS_JOB`, or the launcher's.
    pub fn job(mut self, job: &str) -> Self {
        self.options.job = JoinOptions::name_of(job);
        self
    }

    /// Name, job and traffic class at once, for bindings of other languages. Without a job's name the environment's stays.
    #[doc(hidden)]
    pub fn options(mut self, options: JoinOptions) -> Self {
        let job = if options.job.is_empty() { self.options.job } else { JoinOptions::name_of(&options.job) };
        self.options = JoinOptions { job, name: JoinOptions::name_of(&options.name), ..options };
        self
    }

    /// How long this rank waits for the others. Without it the operator's `limits.init_timeout` alone counts, which holds in any
    /// case. A rank that gives up is no part of the communicator: it ends, if the other ranks still come.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// For tests, whose teams are too small for it to pay: forks each call of GPUs of several hosts that can be. All ranks do alike.
    #[doc(hidden)]
    pub fn fork_all_calls(mut self) -> Self {
        self.forks = Forks::Always;
        self
    }

    /// Joins, with buffers in the host's memory. Returns when all ranks have joined.
    ///
    /// # Errors
    /// [`Error::Refused`] where ranks contradict each other, are missing at a time-out, or the tenant is over its quota.
    /// [`Error::ServiceGone`].
    pub fn join(&self) -> Result<Communicator, Error> {
        self.join_while(|| true)
    }

    /// As [`CommunicatorBuilder::join`]. Asks several times a second whether to go on waiting for the others; a rank that does not gives
    /// up, as at its time-out.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::join`]; [`Error::Refused`] where this rank gave up.
    pub fn join_while(&self, mut go_on: impl FnMut() -> bool) -> Result<Communicator, Error> {
        let joining = self.send_join()?;
        let answer = self.client.wait_for_join(&joining, self, &mut go_on)?;
        self.client.joined(answer, self)
    }

    /// Joins several ranks from one thread: none waits for the others before all have been announced.
    ///
    /// # Errors
    /// The first error of any of them, as for [`CommunicatorBuilder::join`]. Then none of them is a member. If one cannot be
    /// announced, those before it are given up: their communicators end if the other ranks still come.
    pub fn join_all(ranks: &[CommunicatorBuilder]) -> Result<Vec<Communicator>, Error> {
        let mut joining = Vec::with_capacity(ranks.len());
        for rank in ranks {
            match rank.send_join() {
                Ok(announced) => joining.push(announced),
                Err(error) => {
                    ranks.iter().zip(&joining).for_each(|(rank, joining)| rank.client.give_up_join(joining));
                    return Err(error);
                }
            }
        }
        // All answers are taken, so that none is left over when one is an error.
        let joined: Vec<_> = ranks.iter().zip(&joining).map(|(rank, joining)| rank.finish_join(joining)).collect();
        joined.into_iter().collect()
    }

    /// Asks to join, in the host's memory.
    pub(crate) fn send_join(&self) -> Result<Joining, Error> {
        self.send(None)
    }

    /// Asks to join, with buffers on a GPU or in the host's memory.
    pub(crate) fn send(&self, gpu: Option<GpuUuid>) -> Result<Joining, Error> {
        if self.root_address.as_deref() == Some("") {
            return Err(Error::argument("the root address is empty: give none where all ranks are at one service"));
        }
        let request = Request::InitRank {
            id: self.id,
            rank: self.rank,
            nranks: self.nranks,
            gpu,
            root_address: self.root_address.clone().unwrap_or_default(),
            role: Role::Whole,
            options: self.options.clone(),
        };
        let deadline = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Ok(Joining { request: self.client.0.requests.send(request, &[])?, deadline })
    }

    /// Waits until all have joined.
    pub(crate) fn finish_join(&self, joining: &Joining) -> Result<Communicator, Error> {
        let answer = self.client.wait_for_join(joining, self, &mut || true)?;
        self.client.joined(answer, self)
    }
}
