//! Mark by which a file that has the tenant's library in it tells its version to whoever only reads the file: `mccsctl doctor`.

/// Begins the mark.
const BEGINS: &[u8] = b"mccs-library-version:";
/// Ends it.
const END: u8 = b';';
/// Longest version.
const VERSION_BYTES_MAX: usize = 64;

/// The mark of this version's libraries. They keep it where the linker does not leave it out.
pub const MARK: &str = concat!("mccs-library-version:", env!("CARGO_PKG_VERSION"), ";");

/// The version of the library in a file; none, if it has no mark: another library, or mccs before it had one.
#[must_use]
pub fn version_in(file: &[u8]) -> Option<&str> {
    let marks = file.windows(BEGINS.len()).enumerate().filter(|(_, window)| *window == BEGINS);
    let version = |(at, _): (usize, &[u8])| {
        let rest = &file[at + BEGINS.len()..];
        let length = rest.iter().take(VERSION_BYTES_MAX).position(|byte| *byte == END)?;
        let text = std::str::from_utf8(&rest[..length]).ok()?;
        let is_version = |byte: u8| byte.is_ascii_alphanumeric() || b".+-".contains(&byte);
        (text.starts_with(|first: char| first.is_ascii_digit()) && text.bytes().all(is_version)).then_some(text)
    };
    marks.filter_map(version).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_what_the_mark_says() {
        let own = env!("CARGO_PKG_VERSION");
        assert_eq!(version_in(MARK.as_bytes()), Some(own));
        assert_eq!(version_in(&[&b"\x7fELF\0"[..], MARK.as_bytes(), b"\0more"].concat()), Some(own));
        for none in [
            "",
            "mccs-library-version",
            "mccs-library-version:0.1",
            "mccs-library-version:0.\n1;",
            "mccs-library-version:;",
        ] {
            assert_eq!(version_in(none.as_bytes()), None, "{none:?}");
            // A program that looks for marks has the beginning of one.
            assert_eq!(version_in(format!("{none}mccs-library-version:{MARK}").as_bytes()), Some(own), "{none:?}");
        }
        assert_eq!(version_in(format!("mccs-library-version:{};", "1".repeat(VERSION_BYTES_MAX + 1)).as_bytes()), None);
    }
}
