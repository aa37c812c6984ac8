//! The extension of the Python package `mccs`: a session with the host's service, communicators, and memory that both map.
//!
//! It imports the tenant's library, and the driver's for GPUs. The most important types: [`session::Session`],
//! [`communicator::PyCommunicator`], [`lane::Lane`], which orders a rank's calls in the host's memory, and [`cuda_rank::CudaRank`], which
//! does on GPUs. Operations run without the interpreter's lock; a wait looks for signals 20 times a second. [`mpi`] has MPI's functions
//! for JAX. Deliberately absent: starting a service (`mccs/service.py`), and PyTorch (`mccs/torch`).

mod agreement;
mod argument;
mod array;
mod at_exit;
mod calls;
mod collected;
mod communicator;
mod cuda_array;
mod cuda_rank;
mod errors;
mod group;
mod lane;
mod member;
mod mpi;
mod operation;
mod pending;
mod process;
mod session;
mod slots;

use pyo3::prelude::*;

/// See the module.
#[pymodule]
fn _mccs(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<session::Session>()?;
    module.add_class::<session::Memory>()?;
    module.add_class::<communicator::PyCommunicator>()?;
    module.add_class::<pending::PyOperation>()?;
    module.add_class::<group::PyGroup>()?;
    module.add_function(wrap_pyfunction!(session::unique_id, module)?)?;
    module.add_function(wrap_pyfunction!(mpi::mpi_serve, module)?)?;
    let close_all = wrap_pyfunction!(at_exit::close_all, module)?;
    module.py().import("atexit")?.call_method1("register", (&close_all,))?;
    // Not in `__all__`: for tests, whose processes end at once.
    module.setattr("_close_all", close_all)?;
    Ok(())
}
