//! GPU memory in use by all processes of the emulated driver. Memory that anybody has open counts
//! once, as long as somebody has.

use std::collections::HashMap;

use crate::physical::{Name, What};

/// Bytes of a GPU that are in use. Asks /proc, so that what died with its process needs no care.
pub(crate) fn used_bytes(device: usize) -> u64 {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_process = |entry: &std::fs::DirEntry| entry.file_name().as_encoded_bytes()[0].is_ascii_digit();
    let folders = processes.filter(is_process).filter_map(|entry| std::fs::read_dir(entry.path().join("fd")).ok());
    // A descriptor that is closed meanwhile is not there.
    let links = folders.flatten().flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let names = links.filter_map(|link| Name::of_link(&link));
    let own: HashMap<u64, u64> = names
        .filter(|name| name.device == device && name.what == What::Memory)
        .map(|name| (name.nonce, name.bytes))
        .collect();
    own.values().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::physical::Physical;

    #[test]
    fn memory_counts_once_and_not_any_more_when_it_is_closed() {
        // A GPU that no other test has.
        const DEVICE: usize = 77;
        let memory = [3000, 50_000].map(|bytes| Physical::new(What::Memory, DEVICE, bytes).expect("memory"));
        let again = Physical::open(std::process::id(), memory[0].number(), |_| true).expect("open");
        assert_eq!(used_bytes(DEVICE), 53_000);
        drop(memory);
        assert_eq!(used_bytes(DEVICE), 3000);
        drop(again);
        assert_eq!(used_bytes(DEVICE), 0);
    }
}
