//! Every interleaving, and every order of memory, of a writer and readers of a tiny ring.

use loom::sync::Arc;

use super::memory::Memory;
use super::{Read, RecordReader, RecordWords, RecordWriter};

/// Runs all interleavings with at most three preemptions; without a bound these tests take minutes to hours.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}

fn record(number: u64) -> RecordWords {
    [number + 10, 3 * number]
}

/// A writer that laps its ring: what is read is whole and in order, and what is not read is counted.
#[test]
fn loom_records_are_whole_or_lost() {
    const COUNT: u64 = 4;
    check(|| {
        let memory = Memory::of(2);
        let reader = RecordReader { memory: memory.clone() };
        let writer = loom::thread::spawn(move || {
            let writer = RecordWriter::over(memory);
            (0..COUNT).for_each(|number| writer.push(&record(number)));
        });
        let (mut got, mut lost, mut next) = (Vec::new(), 0, 0);
        for is_last in [false, true] {
            if is_last {
                // Nothing is written any more: all that the ring holds can be read.
                loom::thread::yield_now();
            }
            let read = reader.read(next, &mut got);
            assert!(read.next >= next);
            (next, lost) = (read.next, lost + read.lost);
            assert_eq!(got.len() as u64 + lost, next, "each is read or counted");
        }
        writer.join().expect("writer");
        let before = got.len();
        let Read { next: end, lost: more } = reader.read(next, &mut got);
        assert_eq!((end, got.len() as u64 + lost + more), (COUNT, COUNT));
        assert!((got.len() - before) as u64 >= 2.min(COUNT - next), "what is in the ring is read");
        let mut wanted = 0..COUNT;
        assert!(got.iter().all(|words| wanted.any(|number| record(number) == *words)), "{got:?}");
    });
}

/// Readers need not know of each other.
#[test]
fn loom_readers_see_the_same() {
    check(|| {
        let memory = Memory::of(2);
        let reader = Arc::new(RecordReader { memory: memory.clone() });
        let writer = RecordWriter::over(memory);
        writer.push(&record(0));
        let other = {
            let reader = Arc::clone(&reader);
            loom::thread::spawn(move || {
                let mut got = Vec::new();
                (reader.read(0, &mut got), got)
            })
        };
        let mut got = Vec::new();
        assert_eq!(reader.read(0, &mut got), Read { next: 1, lost: 0 });
        writer.push(&record(1));
        let (read, seen) = other.join().expect("reader");
        assert_eq!(got, [record(0)]);
        assert_eq!((read.lost, read.next), (0, seen.len() as u64));
        assert!([&[record(0)][..], &[record(0), record(1)]].contains(&&seen[..]), "{seen:?}");
    });
}
