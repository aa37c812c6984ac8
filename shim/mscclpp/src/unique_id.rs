//! `mscclppUniqueId`: a communicator's name, and where rank 0 is.

use mccs::{Error, UniqueId};

use super::session::client;
use super::{Status, guard, invalid_argument, put};

/// Marks ids that are this library's: another library's name no communicator of ours.
const MARK: [u8; 8] = *b"mccs-id\0";
const NAME_AT: usize = MARK.len();
const ROOT_AT: usize = NAME_AT + 16;

/// See the module's documentation: a mark, the name, and the address of rank 0's service, filled up with zeros.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CUniqueId(pub(crate) [u8; Self::BYTES]);

impl CUniqueId {
    /// Length of one.
    pub(crate) const BYTES: usize = 128;

    /// The id of a new communicator, whose rank 0 is in this process.
    pub(crate) fn new() -> Result<Self, Error> {
        let (client, mut bytes) = (client()?, [0; Self::BYTES]);
        let root = client.root_address().unwrap_or_default().as_bytes();
        bytes[..NAME_AT].copy_from_slice(&MARK);
        bytes[NAME_AT..ROOT_AT].copy_from_slice(&mccs::unique_id()?.0);
        let too_long = || Error::system("the service's name is too long for a unique id");
        bytes[ROOT_AT..].get_mut(..root.len()).ok_or_else(too_long)?.copy_from_slice(root);
        Ok(CUniqueId(bytes))
    }

    /// The name, and the address.
    pub(crate) fn name(&self) -> Result<(UniqueId, &str), Error> {
        let foreign = || invalid_argument("the unique id was not made by this library: does every rank use it?");
        let (mark, rest) = self.0.split_first_chunk().ok_or_else(foreign)?;
        let (name, root) = rest.split_first_chunk().ok_or_else(foreign)?;
        let end = root.iter().position(|byte| *byte == 0).unwrap_or(root.len());
        let root = std::str::from_utf8(&root[..end]).map_err(|_| foreign())?;
        if *mark == MARK { Ok((UniqueId(*name), root)) } else { Err(foreign()) }
    }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppGetUniqueId(id: *mut CUniqueId) -> Status {
    // SAFETY: the caller's contract.
    guard("mscclppGetUniqueId", || unsafe { put(id, CUniqueId::new()?, "uniqueId") })
}
