//! JSON schemas of the files, for editors and other checkers: made of the types that read them, kept in `config/schemas`.
//!
//! A schema says keys, types and forms of values. Ranges, and what keys say of each other, are checked when a file is read
//! ([`crate::validate`]).

#[cfg(test)]
mod generate;

/// A file of an operator's or a user's, and its schema.
#[derive(Debug, Clone, Copy)]
pub struct FileSchema {
    /// The file's usual name without `.toml`.
    pub name: &'static str,
    /// The schema, JSON Schema 2020-12.
    pub text: &'static str,
}

macro_rules! schemas {
    ($($name:literal),*) => {
        [$(FileSchema { name: $name, text: include_str!(concat!("../schemas/", $name, ".json")) }),*]
    };
}

/// All that there are.
pub static SCHEMAS: [FileSchema; 9] =
    schemas!["change", "console", "job", "kubernetes", "policy", "service", "slurm", "tenant", "topology"];

/// The schema of the file of this name, with or without `.toml`.
#[must_use]
pub fn of(name: &str) -> Option<&'static FileSchema> {
    let name = name.strip_suffix(".toml").unwrap_or(name);
    SCHEMAS.iter().find(|schema| schema.name == name)
}
