//! Counts calls of the emulated driver by thread. Each call costs its caller some time, on the
//! driver of GPUs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_char;

thread_local! {
    static CALLS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// The calling thread calls an entry point.
pub(crate) fn count(entry: &'static str) {
    // A thread that ends counts no more.
    let _ = CALLS.try_with(|calls| *calls.borrow_mut().entry(entry).or_default() += 1);
}

/// Writes what the calling thread has called since it asked last, a line an entry point with its name and how often, as far as there is
/// room. Returns how many bytes there are.
///
/// # Safety
/// `to` must have room for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccs_emulated_calls(to: *mut c_char, room: usize) -> usize {
    let calls = CALLS.try_with(RefCell::take).unwrap_or_default();
    let text: String = calls.iter().map(|(entry, times)| format!("{entry} {times}\n")).collect();
    // SAFETY: the caller's contract, and the text has as many bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len().min(room)) };
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> String {
        let mut text = [0_u8; 200];
        // SAFETY: there is as much room.
        let bytes = unsafe { mccs_emulated_calls(text.as_mut_ptr().cast(), text.len()) };
        String::from_utf8(text[..bytes].to_vec()).expect("text")
    }

    #[test]
    fn calls_are_those_of_the_thread_since_it_asked_last() {
        ["b", "a", "b"].into_iter().for_each(count);
        std::thread::spawn(|| count("c")).join().expect("a thread");
        assert_eq!([calls(), calls()], ["a 1\nb 2\n", ""]);
    }
}
