//! Placeholders `{name}` in text of job files, and their replacement.
//!
//! What else stands in braces is no place and stays: TOML's inline tables, shell and awk programs. Filling keeps lines.

use std::collections::BTreeMap;

/// Replaces each `{name}` that `values` knows. Others stay; see [`places`].
#[must_use]
pub fn fill(text: &str, values: &BTreeMap<String, String>) -> String {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, name, after)) = next_place(rest) {
        filled.push_str(before);
        match values.get(name) {
            Some(value) => filled.push_str(value),
            None => {
                filled.push('{');
                filled.push_str(name);
                filled.push('}');
            }
        }
        rest = after;
    }
    filled.push_str(rest);
    filled
}

/// The names of all places in `text`, in its order.
pub fn places(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, name, after) = next_place(rest)?;
        rest = after;
        Some(name)
    })
}

/// Whether `name` can be the name of a place.
#[must_use]
pub fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// What stands before the first place, its name, and what follows.
fn next_place(text: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    while let Some(open) = text[from..].find('{').map(|at| from + at) {
        let inner = &text[open + 1..];
        if let Some(close) = inner.find('}')
            && is_name(&inner[..close])
        {
            return Some((&text[..open], &inner[..close], &inner[close + 1..]));
        }
        from = open + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_names_are_filled_in() {
        let values: BTreeMap<String, String> =
            [("host", "h0"), ("port", "7000")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        assert_eq!(fill("{host}:{port} {hots} {}{ host }{{port}}", &values), "h0:7000 {hots} {}{ host }{7000}");
        assert_eq!(fill("a = { b = 1 }\n'{print $1}'{", &values), "a = { b = 1 }\n'{print $1}'{");
        assert_eq!(places("{a}{B}{b_1} {x{c}}").collect::<Vec<_>>(), ["a", "b_1", "c"]);
    }
}
