//! Listener handle of several transports: one that holds each of theirs.
//!
//! `many`, a version, and of each transport its kind, a length and its handle. Kinds that are not known are skipped.

use mccs_config::service::TransportKind;

use super::super::{HANDLE_BYTES_MAX, ListenerHandle, TransportError};

const MAGIC: &[u8; 4] = b"many";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 8;

fn code(kind: TransportKind) -> u8 {
    match kind {
        TransportKind::Tcp => 1,
        TransportKind::Rdma => 2,
    }
}

/// The handle of all these listeners.
pub(super) fn of(parts: &[(TransportKind, ListenerHandle)]) -> Result<ListenerHandle, TransportError> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    for (kind, part) in parts {
        bytes.extend([code(*kind), part.as_bytes().len() as u8]);
        bytes.extend_from_slice(part.as_bytes());
    }
    ListenerHandle::from_bytes(&bytes)
}

/// The handle of one transport's listener, if there is one. All of it is checked but what is the transports'.
pub(super) fn part(handle: &ListenerHandle, kind: TransportKind) -> Result<Option<ListenerHandle>, TransportError> {
    let bytes = handle.as_bytes();
    let (Some(head), Some(mut rest)) = (bytes.first_chunk::<HEAD_BYTES>(), bytes.get(HEAD_BYTES..)) else {
        return Err(TransportError::BadHandle("it is too short"));
    };
    if !head.starts_with(MAGIC) || head[MAGIC.len()..] != VERSION.to_le_bytes() {
        return Err(TransportError::BadHandle("it was made by another version"));
    }
    let mut found = None;
    while let [of, length, behind @ ..] = rest {
        let (part, next) = behind.split_at_checked((*length).into()).ok_or(GARBLED)?;
        if *of == code(kind) && found.replace(part).is_some() {
            return Err(GARBLED);
        }
        rest = next;
    }
    if rest.is_empty() { found.map(ListenerHandle::from_bytes).transpose() } else { Err(GARBLED) }
}

const GARBLED: TransportError = TransportError::BadHandle("it is garbled");

const _: () = assert!(HANDLE_BYTES_MAX <= u8::MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found_and_garbage_is_refused() {
        let [tcp, rdma] = [[1; 50].as_slice(), &[2; 58]].map(|bytes| ListenerHandle::from_bytes(bytes).unwrap());
        let both = of(&[(TransportKind::Rdma, rdma.clone()), (TransportKind::Tcp, tcp.clone())]).unwrap();
        assert_eq!(part(&both, TransportKind::Tcp).unwrap(), Some(tcp.clone()));
        assert_eq!(part(&both, TransportKind::Rdma).unwrap(), Some(rdma));
        let alone = of(&[(TransportKind::Tcp, tcp.clone())]).unwrap();
        assert_eq!(part(&alone, TransportKind::Rdma).unwrap(), None);
        let twice = [alone.as_bytes(), &alone.as_bytes()[HEAD_BYTES..]].concat();
        let unknown = [alone.as_bytes(), &[9, 2, 0, 0]].concat();
        assert_eq!(
            part(&ListenerHandle::from_bytes(&unknown).unwrap(), TransportKind::Tcp).unwrap(),
            Some(tcp.clone())
        );
        for length in 0..alone.as_bytes().len() {
            let cut = ListenerHandle::from_bytes(&alone.as_bytes()[..length]).unwrap();
            // Cut behind the head it has no parts.
            assert_eq!(part(&cut, TransportKind::Tcp).is_ok(), length == HEAD_BYTES, "{length}");
        }
        for garbage in [tcp.as_bytes(), &twice, &[both.as_bytes(), &[1]].concat()] {
            let garbage = ListenerHandle::from_bytes(garbage).unwrap();
            assert!(matches!(part(&garbage, TransportKind::Tcp), Err(TransportError::BadHandle(_))));
        }
    }
}
