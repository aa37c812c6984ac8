//! Prints lines of `mccsctl`; a reader that has left (broken pipe) ends the program quietly.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write as _};
use std::process::exit;

/// As `println!`, which panics where nobody reads.
macro_rules! say {
    () => { $crate::out::line(format_args!("")) };
    ($($word:tt)*) => { $crate::out::line(format_args!($($word)*)) };
}

/// Prints a line. Ends the program if that cannot be.
pub fn line(line: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        exit(0);
    }
    eprintln!("mccsctl: cannot print: {error}");
    exit(1);
}
