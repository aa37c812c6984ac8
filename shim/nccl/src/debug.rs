//! `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_DEBUG_FILE`: levels, subsystems and the form of log
//! lines. Nothing is printed where it is not set.
//!
//! | variable | values |
//! | --- | --- |
//! | `NCCL_DEBUG` | `VERSION`, `WARN`, `INFO`, `ABORT`, `TRACE`: each with all before it |
//! | `NCCL_DEBUG_SUBSYS` | names of [`SUBSYSTEMS`], separated by commas; `^` in front: all but these |
//! | `NCCL_DEBUG_FILE` | a file instead of standard output; `%h` is the host's name, `%p` the process |
//!
//! The variables are read at the first call that may print, and again after `ncclResetDebugInit`. A call that prints nothing costs
//! one load.

use std::ffi::CStr;
use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};

use mccs::LogLevel;
use mccs_cuda::{CudaVersion, cuda_version};

use super::communicators::locked;

/// `ncclDebugLogLevel`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub(crate) enum Level {
    None,
    Version,
    Warn,
    Info,
    Abort,
    Trace,
}

/// Bits of `NCCL_DEBUG_SUBSYS`.
pub(crate) const INIT: u64 = 1 << 0;
pub(crate) const COLL: u64 = 1 << 1;
pub(crate) const ENV: u64 = 1 << 7;
pub(crate) const CALL: u64 = 1 << 9;
pub(crate) const BOOTSTRAP: u64 = 1 << 12;
pub(crate) const PROFILE: u64 = 1 << 14;
pub(crate) const DESTROY: u64 = 1 << 16;
pub(crate) const ALL: u64 = u64::MAX;

/// Their names; those without lines here are accepted.
const SUBSYSTEMS: [(&str, u64); 19] = [
    ("INIT", INIT),
    ("COLL", COLL),
    ("P2P", 1 << 2),
    ("SHM", 1 << 3),
    ("NET", 1 << 4),
    ("GRAPH", 1 << 5),
    ("TUNING", 1 << 6),
    ("ENV", ENV),
    ("ALLOC", 1 << 8),
    ("CALL", CALL),
    ("PROXY", 1 << 10),
    ("NVLS", 1 << 11),
    ("BOOTSTRAP", BOOTSTRAP),
    ("REG", 1 << 13),
    ("PROFILE", PROFILE),
    ("RAS", 1 << 15),
    ("DESTROY", DESTROY),
    ("ALLOC_HOST", 1 << 17),
    ("ALL", ALL),
];

/// Level in the upper bits, subsystems in the lower ones; before the variables are read, everything: whoever asks reads them.
static ENABLED: AtomicU64 = AtomicU64::new(UNREAD);
const UNREAD: u64 = u64::MAX;
const LEVEL_SHIFT: u32 = 32;
const MASK: u64 = (1 << LEVEL_SHIFT) - 1;

/// Destination of lines; none is standard output.
static SINK: Mutex<Option<File>> = Mutex::new(None);

/// Whether a line would be printed.
pub(crate) fn is_on(level: Level, subsystem: u64) -> bool {
    let mut enabled = ENABLED.load(Ordering::Acquire);
    if enabled == UNREAD {
        enabled = read_variables();
    }
    (enabled >> LEVEL_SHIFT) as u32 >= level as u32 && enabled & subsystem & MASK != 0
}

/// Reads the variables again, when next asked.
pub(crate) fn reset() {
    ENABLED.store(UNREAD, Ordering::Release);
}

fn read_variables() -> u64 {
    // One thread reads: a second one would empty the file that the first has begun.
    static READING: Mutex<()> = Mutex::new(());
    let _reading = locked(&READING);
    let enabled = ENABLED.load(Ordering::Acquire);
    if enabled != UNREAD {
        return enabled;
    }
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let level = level_of(&variable("NCCL_DEBUG"));
    let enabled = (level as u64) << LEVEL_SHIFT | subsystems_of(&variable("NCCL_DEBUG_SUBSYS")) & MASK;
    let name = variable("NCCL_DEBUG_FILE");
    let mut failed = None;
    if level > Level::Version && !name.is_empty() {
        let path = file_name(&name, &host_name(), std::process::id());
        let opened = File::create(&path).map_err(|error| failed = Some(format!("NCCL_DEBUG_FILE: {path}: {error}")));
        *locked(&SINK) = opened.ok();
    } else {
        *locked(&SINK) = None;
    }
    ENABLED.store(enabled, Ordering::Release);
    if let Some(reason) = failed {
        // It takes no lock of this function's: the variables are read.
        line(Level::Warn, format_args!("{reason}"));
    }
    enabled
}

fn level_of(text: &str) -> Level {
    match text.to_ascii_uppercase().as_str() {
        "VERSION" => Level::Version,
        "WARN" => Level::Warn,
        "INFO" => Level::Info,
        "ABORT" => Level::Abort,
        "TRACE" => Level::Trace,
        _ => Level::None,
    }
}

fn subsystems_of(text: &str) -> u64 {
    if text.is_empty() {
        return INIT | BOOTSTRAP | ENV | DESTROY;
    }
    let (is_inverse, names) = text.strip_prefix('^').map_or((false, text), |names| (true, names));
    let bit =
        |name: &str| SUBSYSTEMS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map_or(0, |(_, bit)| *bit);
    let bits = names.split(',').map(|name| bit(name.trim())).fold(0, |all, bit| all | bit);
    if is_inverse { !bits } else { bits }
}

/// The file's name, with what its placeholders stand for.
fn file_name(pattern: &str, host: &str, process: u32) -> String {
    let (mut name, mut rest) = (String::new(), pattern.chars());
    while let Some(next) = rest.next() {
        match (next, if next == '%' { rest.next() } else { None }) {
            ('%', Some('h')) => name.push_str(host),
            ('%', Some('p')) => name.push_str(&process.to_string()),
            ('%', Some('%') | None) => name.push('%'),
            ('%', Some(other)) => name.extend(['%', other]),
            (other, _) => name.push(other),
        }
    }
    name
}

/// The host's name up to the first dot, fit for a file's name.
fn host_name() -> String {
    let mut bytes = [0u8; 256];
    // SAFETY: there is room for one byte less than that, so the last one stays zero.
    unsafe { libc::gethostname(bytes.as_mut_ptr().cast(), bytes.len() - 1) };
    let name = CStr::from_bytes_until_nul(&bytes).map_or("".into(), CStr::to_string_lossy);
    name.split('.').next().unwrap_or_default().replace(['%', '/'], "-")
}

/// The local time, as lines of warnings begin.
fn timestamp() -> String {
    let mut text = [0u8; 64];
    // SAFETY: all pointers are to locals that live, and the format ends with zero.
    let written = unsafe {
        let (now, mut parts) = (libc::time(std::ptr::null_mut()), std::mem::zeroed());
        libc::localtime_r(&now, &mut parts);
        libc::strftime(text.as_mut_ptr().cast(), text.len(), c"%F %T".as_ptr(), &parts)
    };
    String::from_utf8_lossy(&text[..written]).into_owned()
}

/// From now on prints what the library says of its sessions and communicators. Failures become errors of calls, which print themselves.
pub(crate) fn hear_library() {
    static HEARS: Once = Once::new();
    HEARS.call_once(|| {
        mccs::set_log_handler(|level, message| {
            if level > LogLevel::Error && is_on(Level::Info, INIT) {
                line(Level::Info, format_args!("{message}"));
            }
        });
    });
}

/// Prints a line, which the caller has found to be wanted.
pub(crate) fn line(level: Level, message: Arguments<'_>) {
    // SAFETY: it asks for a number.
    let (process, thread) = (std::process::id(), unsafe { libc::gettid() });
    let (host, gpu) = (host_name(), mccs_cuda::current_ordinal().unwrap_or(0));
    let text = match level {
        Level::Version => format!("{message}\n"),
        Level::Warn => format!("[{}] {host}:{process}:{thread} [{gpu}] NCCL WARN {message}\n", timestamp()),
        Level::Trace => format!("{host}:{process}:{thread} NCCL CALL {message}\n"),
        _ => format!("{host}:{process}:{thread} [{gpu}] NCCL INFO {message}\n"),
    };
    let mut sink = locked(&SINK);
    // Nobody may read it any more. One write a line, so that lines of several processes stay whole.
    let _ = match sink.as_mut() {
        Some(file) => file.write_all(text.as_bytes()),
        None => std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush()),
    };
}

/// Prints a line of `NCCL_DEBUG=INFO`, if its subsystem is wanted.
macro_rules! info {
    ($subsystem:expr, $($message:tt)*) => {
        if $crate::debug::is_on($crate::debug::Level::Info, $subsystem) {
            $crate::debug::line($crate::debug::Level::Info, format_args!($($message)*));
        }
    };
}
pub(crate) use info;

/// Prints a call in the form that replay tools read, with `NCCL_DEBUG=TRACE` and the subsystem `CALL`.
macro_rules! trace_call {
    ($($message:tt)*) => {
        if $crate::debug::is_on($crate::debug::Level::Trace, $crate::debug::CALL) {
            $crate::debug::line($crate::debug::Level::Trace, format_args!($($message)*));
        }
    };
}
pub(crate) use trace_call;

/// Prints the version, once a process: with `INFO` by the first rank, with less by rank 0.
pub(crate) fn version(rank: i32) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    let is_wanted = is_on(Level::Info, ALL) || rank == 0 && is_on(Level::Version, ALL);
    if !is_wanted {
        return;
    }
    ONCE.call_once(|| {
        let number = super::VERSION;
        let CudaVersion { major: cuda, minor } = cuda_version().unwrap_or_default();
        let name =
            format!("NCCL version {}.{}.{}+cuda{cuda}.{minor}", number / 10_000, number / 100 % 100, number % 100);
        if is_on(Level::Info, ALL) {
            line(Level::Info, format_args!("{name}"));
            line(
                Level::Info,
                format_args!("mccs version {}: collectives are the service's", env!("CARGO_PKG_VERSION")),
            );
        } else {
            line(Level::Version, format_args!("{name}"));
        }
    });
}

/// Has lines of a level go into a file, whatever the variables say.
#[cfg(test)]
pub(crate) fn print_to_file_for_tests(level: Level, path: &std::path::Path) {
    *locked(&SINK) = File::create(path).ok();
    ENABLED.store((level as u64) << LEVEL_SHIFT | MASK, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_subsystems_are_read_as_nccl_reads_them() {
        assert!(level_of("info") == Level::Info && level_of("Trace") == Level::Trace && level_of("x") == Level::None);
        assert!(Level::None < Level::Version && Level::Version < Level::Warn && Level::Warn < Level::Info);
        assert_eq!(subsystems_of(""), INIT | BOOTSTRAP | ENV | DESTROY);
        assert_eq!(subsystems_of("coll,INIT"), COLL | INIT);
        assert_eq!(subsystems_of("^COLL"), !COLL);
        assert_eq!(subsystems_of("nothing"), 0);
        assert_eq!(subsystems_of("ALL"), ALL);
    }

    #[test]
    fn a_files_name_has_the_host_and_the_process() {
        let names = [("/x/%h.%p.log", "/x/node.42.log"), ("%%p", "%p"), ("a%z%", "a%z%"), ("plain", "plain")];
        for (pattern, name) in names {
            assert_eq!(file_name(pattern, "node", 42), name);
        }
    }
}
