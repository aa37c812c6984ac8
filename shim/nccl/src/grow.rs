//! `ncclCommGrow`: ranks join those of a living communicator, in a new one.
//!
//! Old ranks keep their numbers, and rank 0 stays the root. The new communicator's name follows from the old one's and from how often that has
//! grown, so that old ranks need to be told nothing. New ranks get the name as a unique id.

use std::ffi::{c_int, c_void};
use std::sync::PoisonError;

use mccs::Error;

use super::communicators::{Comm, Made, Name, NcclUniqueId, own_root};
use super::config::CommConfig;
use super::group::{begin, joining};
use super::split::derived_id;
use super::{Status, guard, guard_in_group, put, refused};

/// How often a communicator has grown, on this rank.
#[derive(Default)]
pub(crate) struct Growth {
    grown: u64,
    /// Whether an id was given out that nobody has grown by yet.
    has_id: bool,
}

impl Made {
    /// The name of what this communicator grows to next.
    fn grown_name(&self, growth: &Growth) -> Result<Name, Error> {
        let root = self.roots.first().copied().map_or_else(own_root, Ok)?;
        Ok(Name { id: derived_id(self.name.id, growth.grown, *b"grow"), root })
    }

    fn with_growth<R>(&self, act: impl FnOnce(&mut Growth) -> Result<R, Error>) -> Result<R, Error> {
        act(&mut self.growth.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn wrong<T>(what: String) -> Result<T, Error> {
    Err(Error::InvalidArgument(format!("ncclCommGrow: {what}")))
}

/// The id by which new ranks join what this communicator grows to next; see `nccl.h`. One rank asks, once before each growth.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetUniqueId(comm: *mut Comm, id: *mut NcclUniqueId) -> Status {
    guard(|| {
        let comm = Comm::of(comm)?;
        comm.comm()?;
        comm.with_growth(|growth| {
            if growth.has_id {
                let message = "the last id is not used yet; call ncclCommGrow before asking for another";
                return Err(refused("ncclCommGetUniqueId", message));
            }
            // SAFETY: the caller's contract.
            unsafe { put(id, NcclUniqueId::of(&comm.grown_name(growth)?), "uniqueId")? };
            growth.has_id = true;
            Ok(())
        })
    })
}

/// Makes a communicator of all ranks of `comm` and of new ones, whose `comm` is null; see `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGrow(
    comm: *mut Comm,
    nranks: c_int,
    id: *const NcclUniqueId,
    rank: c_int,
    new: *mut *mut Comm,
    config: *mut c_void,
) -> Status {
    guard_in_group(|| {
        // SAFETY: the caller's contract.
        let (id, config) = unsafe { (id.as_ref(), CommConfig::read(config)?) };
        if new.is_null() {
            return wrong("newcomm is null".into());
        }
        let parent = if comm.is_null() { None } else { Some(Comm::of(comm)?) };
        let is_blocking = config.is_blocking.or(parent.as_ref().map(Made::is_blocking)).unwrap_or(true);
        let (name, own) = match &parent {
            Some(parent) => old_rank(parent, nranks, id, rank)?,
            None => new_rank(nranks, id, rank)?,
        };
        let inherited = || parent.as_ref().map(|parent| parent.options.clone());
        let options = config.options.or_else(inherited).unwrap_or_default();
        let begun = Comm::unmade("ncclCommGrow", is_blocking, options)?;
        begun.expected.know(own, nranks);
        let make = joining(&begun, name, own, nranks);
        // SAFETY: the caller's contract.
        unsafe { begin(new, is_blocking, Some(begun), parent, make) }
    })
}

/// Communicator and rank that a rank of the old one joins as.
fn old_rank(parent: &Made, nranks: c_int, id: Option<&NcclUniqueId>, rank: c_int) -> Result<(Name, c_int), Error> {
    parent.comm()?;
    if rank != -1 {
        return wrong(format!("a rank of the old communicator keeps its number and passes -1, not {rank}"));
    }
    if nranks <= parent.nranks as c_int {
        return wrong(format!("{nranks} ranks are not more than the {} of the old communicator", parent.nranks));
    }
    parent.with_growth(|growth| {
        let name = parent.grown_name(growth)?;
        if id.is_some_and(|id| id.name().map_or(true, |id| id.id != name.id)) {
            return wrong("the id is not of the communicator's next growth; ask ncclCommGetUniqueId for one".into());
        }
        growth.grown += 1;
        growth.has_id = false;
        Ok((name, parent.rank as c_int))
    })
}

/// Communicator and rank that a new rank joins as.
fn new_rank(nranks: c_int, id: Option<&NcclUniqueId>, rank: c_int) -> Result<(Name, c_int), Error> {
    let Some(id) = id else { return wrong("a new rank passes the id of ncclCommGetUniqueId, not null".into()) };
    if rank < 0 || rank >= nranks {
        return wrong(format!("new rank {rank} of {nranks}"));
    }
    Ok((id.name()?, rank))
}
