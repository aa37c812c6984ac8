//! A listener's handle for its peer, which NCCL carries: 128 bytes that name the communicator and the service of
//! its rank 0.
//!
//! ```text
//! 0        8                24       25
//! mark     unique id        length   root address
//! ```
//!
//! Nobody can guess the id. Services let ranks of one tenant alone meet.

use mccs::{Error, UniqueId};

use crate::invalid_argument;

/// `NCCL_NET_HANDLE_MAXSIZE`.
pub(crate) const HANDLE_BYTES: usize = 128;
/// The last byte is the handle's version.
const MARK: [u8; 8] = *b"mccsnet\x01";
const ID_AT: usize = 8;
const LENGTH_AT: usize = 24;
const ADDRESS_AT: usize = 25;

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) id: UniqueId,
    /// Empty where the listener's service knows no other.
    pub(crate) root_address: String,
}

impl Handle {
    pub(crate) fn to_bytes(&self) -> Result<[u8; HANDLE_BYTES], Error> {
        let Handle { id, root_address } = self;
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..ID_AT].copy_from_slice(&MARK);
        bytes[ID_AT..LENGTH_AT].copy_from_slice(&id.0);
        let room = HANDLE_BYTES - ADDRESS_AT;
        let length = u8::try_from(root_address.len()).ok().filter(|length| usize::from(*length) <= room);
        bytes[LENGTH_AT] = length.ok_or_else(|| {
            invalid_argument(format!(
                "the service's address is {root_address:?}: NCCL carries {room} bytes of it; give the host a shorter name in \
                 [[host]] address"
            ))
        })?;
        bytes[ADDRESS_AT..ADDRESS_AT + root_address.len()].copy_from_slice(root_address.as_bytes());
        Ok(bytes)
    }

    pub(crate) fn from_bytes(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, Error> {
        if bytes[..ID_AT - 1] != MARK[..ID_AT - 1] {
            return Err(invalid_argument(
                "the peer does not listen by mccs: its NCCL uses another network, as where no mccs-service runs on its host",
            ));
        }
        if bytes[..ID_AT] != MARK {
            let (theirs, ours) = (bytes[ID_AT - 1], MARK[ID_AT - 1]);
            return Err(invalid_argument(format!(
                "the peer's plugin has handles of version {theirs}, this one {ours}"
            )));
        }
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[ID_AT..LENGTH_AT]);
        let address = bytes[ADDRESS_AT..].get(..usize::from(bytes[LENGTH_AT]));
        let address = address.and_then(|bytes| std::str::from_utf8(bytes).ok());
        let root_address = address.ok_or_else(|| invalid_argument("the peer's handle has no address"))?.to_owned();
        Ok(Handle { id: UniqueId(id), root_address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_comes_back_from_its_bytes_and_others_are_refused() {
        let handle = Handle { id: UniqueId(*b"0123456789abcdef"), root_address: "10.0.0.1:7400".into() };
        let bytes = handle.to_bytes().expect("short");
        assert_eq!(Handle::from_bytes(&bytes).expect("as written"), handle);
        let refused = |at: usize, byte: u8| {
            let mut wrong = bytes;
            wrong[at] = byte;
            Handle::from_bytes(&wrong).expect_err("wrong").to_string()
        };
        assert!(refused(0, b'x').contains("another network"));
        assert!(refused(7, 2).contains("version 2, this one 1"));
        assert!(refused(24, 104).contains("no address") && refused(25, 0xff).contains("no address"));
        let long = Handle { root_address: "h".repeat(104), ..handle };
        assert!(long.to_bytes().expect_err("too long").to_string().contains("103 bytes"));
    }
}
