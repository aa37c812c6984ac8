//! MPI's functions, as far as JAX's collectives on CPUs call them. JAX finds them through MPItrampoline, which is told this extension's
//! path (`mccs/jax.py`).
//!
//! MPItrampoline's interface, version 2, fixes names and sizes: handles have a word, and values of constants are the library's choice.
//! [`calls`] has the functions, [`world`] the communicators and requests behind the handles, [`names`] what is not served. The world is
//! a communicator that Python has joined. Deliberately absent: whatever JAX does not call.
//!
//! Callers are threads of JAX's, without the interpreter's lock. JAX drops most error codes of making communicators: what went wrong
//! there, each later call on the communicator says.

mod calls;
mod names;
mod world;

pub(crate) use world::mpi_serve;
