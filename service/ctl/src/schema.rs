//! `mccsctl schema`: JSON schemas of the files that operators and users write.

use anyhow::Context as _;
use clap::Args;
use mccs_config::schema::{self, SCHEMAS};

/// Print the JSON schema of a file, for editors and checkers. Without a name, print the names. Asks no
/// service.
#[derive(Args)]
pub struct Schema {
    /// The file, such as service or service.toml.
    name: Option<String>,
}

impl Schema {
    pub fn run(&self) -> anyhow::Result<()> {
        let Some(name) = &self.name else {
            SCHEMAS.iter().for_each(|schema| say!("{}", schema.name));
            return Ok(());
        };
        let unknown = || {
            let names: Vec<_> = SCHEMAS.iter().map(|schema| schema.name).collect();
            format!("no file is called {name:?}: there are {}", names.join(", "))
        };
        let found = schema::of(name).with_context(unknown)?;
        say!("{}", found.text.trim_end());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_there_is_not_is_refused_with_those_that_there_are() {
        let refused = Schema { name: Some("fabrics".into()) }.run().expect_err("unknown").to_string();
        assert!(refused.contains("\"fabrics\"") && refused.contains("service, slurm"), "{refused}");
        assert!(schema::of("policy.toml").is_some_and(|found| found.text.contains("\"title\": \"policy.toml\"")));
    }
}
