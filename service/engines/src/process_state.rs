//! Whether a tenant's process is exiting or was killed (`/proc`), which its socket may not tell for
//! long.
//!
//! The kernel closes a process' sockets last: behind a core dump, which takes as long as its memory is large, and perhaps behind
//! the GPUs' driver, which first stops what runs. Its peers need not wait for that.

/// Flags of a task in `/proc/PID/stat`: it is in the kernel's exit.
const PF_EXITING: u64 = 0x4;

/// Whether a process has begun to end. A process that cannot be looked at is not known to be ending: no.
pub(crate) fn is_ending(pid: i32) -> bool {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    pid > 0 && says_ending(&read("stat"), &read("status"))
}

fn says_ending(stat: &str, status: &str) -> bool {
    // The name is the process' own choice, and may have spaces and brackets in it.
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let state = fields.next().unwrap_or_default();
    let flags = fields.nth(5).and_then(|flags| flags.parse().ok()).unwrap_or(0);
    let dumps_core =
        status.lines().filter_map(|line| line.strip_prefix("CoreDumping:")).any(|value| value.trim() == "1");
    matches!(state, "Z" | "X") || flags & PF_EXITING != 0 || dumps_core
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_ends_when_it_dumps_its_core_exits_or_is_a_zombie() {
        let stat = |state: &str, flags: u64| format!("7 (a ) b (c) {state} 1 7 7 0 -1 {flags} 9 0 0 0");
        assert!(!says_ending(&stat("S", 0x40_0040), "Name:\tx\nCoreDumping:\t0\n"));
        assert!(says_ending(&stat("S", 0x40_0040), "Name:\tx\nCoreDumping:\t1\n"));
        assert!(says_ending(&stat("D", 0x40_0044), ""));
        assert!(says_ending(&stat("Z", 0), ""));
        assert!(!says_ending("", ""));
        assert!(!says_ending("7 (CoreDumping: 1) R", "Name:\tCoreDumping:\t1\n"));
    }

    #[test]
    fn this_process_lives_and_one_that_was_not_waited_for_has_ended() {
        assert!(!is_ending(std::process::id() as i32) && !is_ending(0) && !is_ending(-1));
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        while !is_ending(child.id() as i32) {
            std::thread::yield_now();
        }
        child.wait().expect("its end");
        assert!(!is_ending(child.id() as i32), "nothing is known of it any more");
    }
}
