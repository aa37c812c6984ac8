//! Rings as processes see them.

use std::os::fd::{AsFd, OwnedFd};

use super::*;

const CAPACITY: u64 = 1024;

fn ring() -> (OwnedFd, RecordWriter) {
    let (fd, mapping) = Mapping::create_for_readers("records", records_bytes(CAPACITY)).expect("memory");
    (fd, RecordWriter::new(mapping, CAPACITY).expect("a ring"))
}

fn record(number: u64) -> RecordWords {
    [number, 3 * number, !number, 0, 1, number ^ 77, u64::MAX]
}

#[test]
fn the_oldest_records_go_first() {
    let (fd, writer) = ring();
    let reader = RecordReader::map(fd.as_fd()).expect("a ring");
    let mut got = Vec::new();
    assert_eq!(reader.read(0, &mut got), Read { next: 0, lost: 0 });
    (0..CAPACITY + 100).for_each(|number| writer.push(&record(number)));
    assert_eq!(reader.read(0, &mut got), Read { next: CAPACITY + 100, lost: 100 });
    assert_eq!(got.len() as u64, CAPACITY);
    assert!((100..).zip(&got).all(|(number, words)| *words == record(number)));
    assert_eq!(reader.read(CAPACITY + 99, &mut got), Read { next: CAPACITY + 100, lost: 0 });
    assert_eq!(reader.read(u64::MAX, &mut got), Read { next: CAPACITY + 100, lost: 0 });
    assert_eq!((got.len() as u64, writer.next()), (CAPACITY + 1, CAPACITY + 100));
    // It is there as long as somebody reads it.
    drop((writer, fd));
    assert_eq!(reader.next(), CAPACITY + 100);
}

/// A writer that laps its reader again and again: what is read is whole, in order, and all that is not read is counted.
#[test]
fn a_reader_that_is_lapped_reads_nothing_torn() {
    const COUNT: u64 = 1000 * CAPACITY;
    let (fd, writer) = ring();
    let reader = RecordReader::map(fd.as_fd()).expect("a ring");
    let writer = std::thread::spawn(move || (0..COUNT).for_each(|number| writer.push(&record(number))));
    let (mut from, mut lost, mut count, mut last, mut got) = (0, 0, 0, None, Vec::new());
    while from < COUNT {
        let read = reader.read(from, &mut got);
        for words in got.drain(..) {
            assert_eq!(words, record(words[0]), "torn");
            assert!(last.is_none_or(|last| words[0] > last), "{} after {last:?}", words[0]);
            last = Some(words[0]);
            count += 1;
        }
        (from, lost) = (read.next, lost + read.lost);
    }
    writer.join().expect("writer");
    assert_eq!(count + lost, COUNT);
    assert!(count > 0);
}

#[test]
fn what_is_no_ring_or_another_versions_is_refused() {
    let map = |words: [u64; 3], bytes: u64| {
        let (fd, mapping) = Mapping::create("records", bytes).expect("memory");
        // SAFETY: the mapping has room for them, and nobody else uses it.
        unsafe { mapping.as_ptr().cast::<[u64; 3]>().write(words) };
        RecordReader::map(fd.as_fd())
    };
    let magic = u64::from_be_bytes(*b"mccsrec\0");
    assert!(map([magic, VERSION, 64], records_bytes(64)).is_ok());
    assert!(matches!(map([magic + 1, VERSION, 64], 8192), Err(RecordsError::NotRecords)));
    assert!(matches!(map([magic, 99, 64], 8192), Err(RecordsError::Version { theirs: 99 })));
    for capacity in [0, 3, 2 * CAPACITY_MAX, u64::MAX] {
        assert!(matches!(map([magic, VERSION, capacity], 8192), Err(RecordsError::BadCapacity(_))), "{capacity}");
    }
    assert!(matches!(map([magic, VERSION, 256], 8192), Err(RecordsError::Shm(ShmError::TooShort { .. }))));
    assert!(matches!(map([magic, VERSION, 64], 100), Err(RecordsError::Shm(ShmError::TooShort { .. }))));
    let file = std::fs::File::open("/proc/self/exe").expect("a file");
    assert!(matches!(RecordReader::map(file.as_fd()), Err(RecordsError::Shm(ShmError::NotMemfd))));
}

/// A hostile writer's count is bounded: no read is longer than the ring.
#[test]
fn a_count_that_cannot_be_is_bounded() {
    let (fd, writer) = ring();
    writer.push(&record(0));
    let reader = RecordReader::map(fd.as_fd()).expect("a ring");
    writer.memory.header().next.store(u64::MAX, Ordering::Relaxed);
    let mut got = Vec::new();
    assert_eq!(reader.read(0, &mut got), Read { next: u64::MAX, lost: u64::MAX });
    assert!(got.is_empty());
}
