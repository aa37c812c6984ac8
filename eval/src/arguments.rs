//! What the command lines of benchmarks share.

/// A comma-separated list, or everything.
///
/// # Errors
/// A name that is none of `T`'s; the text says which there are.
pub fn list<T: std::str::FromStr<Err = String> + Copy>(text: &str, all: &[T]) -> anyhow::Result<Vec<T>> {
    if text == "all" {
        return Ok(all.to_vec());
    }
    text.split(',').map(|name| name.parse().map_err(anyhow::Error::msg)).collect()
}

/// Makes seeds differ from run to run.
#[must_use]
pub fn unix_time_ns() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64)
}
