//! Sessions with a service, and memory that both map.

use mccs::{Client, CommunicatorBuilder, Region, UniqueId};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::argument::{Argument, duration};
use crate::errors::{self, Caller};
use crate::process::OfProcess;

/// A random id for a new communicator: 32 hexadecimal digits. One rank makes it and tells the others.
#[pyfunction]
pub(crate) fn unique_id() -> PyResult<String> {
    mccs::unique_id().map(|id| id.to_string()).map_err(|error| errors::of(&error))
}

pub(crate) fn parse_id(text: &str) -> PyResult<UniqueId> {
    text.parse().map_err(|error| errors::of(&mccs::Error::from(error)))
}

/// Session(socket)
/// --
///
/// A session of this process with the service that listens on a socket.
#[pyclass(frozen, module = "mccs")]
pub(crate) struct Session {
    client: OfProcess<Client>,
    socket: std::path::PathBuf,
}

/// How a rank joins, as Python says it.
pub(crate) struct Joining<'a> {
    pub(crate) unique_id: &'a str,
    pub(crate) rank: Argument<u32>,
    pub(crate) nranks: Argument<u32>,
    pub(crate) root_address: Option<&'a str>,
    pub(crate) name: Option<&'a str>,
    pub(crate) timeout: Option<Argument<f64>>,
}

impl Session {
    pub(crate) fn client(&self) -> PyResult<&Client> {
        self.client.get()
    }

    /// A rank that is about to join, and who calls for it.
    pub(crate) fn builder(&self, py: Python<'_>, joining: Joining<'_>) -> PyResult<(CommunicatorBuilder, Caller)> {
        let refused = |message: String| errors::of_argument(py, "join", &message);
        let Joining { unique_id, rank, nranks, root_address, name, timeout } = joining;
        let (rank, nranks) = (rank.get("rank").map_err(refused)?, nranks.get("nranks").map_err(refused)?);
        let timeout = timeout.map(|timeout| timeout.get("timeout")).transpose().and_then(duration).map_err(refused)?;
        let mut builder = self.client()?.communicator(parse_id(unique_id)?, rank, nranks).root_address(root_address);
        if let Some(name) = name {
            builder = builder.name(name);
        }
        if let Some(timeout) = timeout {
            builder = builder.timeout(timeout);
        }
        Ok((builder, Caller { rank, nranks }))
    }
}

#[pymethods]
impl Session {
    #[new]
    fn new(py: Python<'_>, socket: std::path::PathBuf) -> PyResult<Self> {
        let client = py.detach(|| Client::connect(&socket)).map_err(|error| errors::of(&error))?;
        Ok(Session { client: OfProcess::new(client), socket })
    }

    /// Path of the service's socket, as ``MCCS_SOCKET`` names it to other programs.
    #[getter]
    fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    /// Whether the service still serves this session.
    #[getter]
    fn is_alive(&self) -> bool {
        self.client().is_ok_and(Client::is_alive)
    }

    /// Name of the tenant that the operator takes this process for.
    #[getter]
    fn tenant(&self) -> PyResult<&str> {
        self.client().map(Client::tenant)
    }

    /// Number of the session, as ``mccsctl`` shows it.
    #[getter]
    fn number(&self) -> PyResult<u64> {
        self.client().map(Client::session)
    }

    /// The root address that ranks at other services name, if rank 0 is in this process; ``None`` for a service that knows no
    /// others.
    #[getter]
    fn root_address(&self) -> PyResult<Option<&str>> {
        self.client().map(Client::root_address)
    }

    /// Allocates memory that the service maps too: collectives on it copy nothing.
    fn allocate(&self, py: Python<'_>, bytes: Argument<usize>) -> PyResult<Memory> {
        let bytes = bytes.get("bytes").map_err(|message| errors::of_argument(py, "allocate", &message))?;
        let client = self.client()?;
        let region = py.detach(|| client.allocate(bytes.max(1) as u64)).map_err(|error| errors::of(&error))?;
        Ok(Memory { region: OfProcess::new(region), bytes })
    }
}

/// Memory that the service maps too. NumPy takes it by ``numpy.asarray``, as bytes.
#[pyclass(frozen, module = "mccs")]
pub(crate) struct Memory {
    region: OfProcess<Region>,
    bytes: usize,
}

#[pymethods]
impl Memory {
    fn __len__(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.region.get()?.as_ptr().expose_provenance())
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.bytes,))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.address()?, false))?;
        Ok(interface)
    }
}
