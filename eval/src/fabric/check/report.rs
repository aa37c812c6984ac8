//! Report of a fabric's check, as tables: one a question, and for each row what is wrong with it,
//! if anything.

use std::fmt;

/// One question and its answers.
#[derive(Debug)]
pub struct Section {
    /// The question.
    pub title: &'static str,
    /// Heads of the columns.
    pub columns: &'static [&'static str],
    /// The answers.
    pub rows: Vec<Row>,
}

/// One answer.
#[derive(Debug)]
pub struct Row {
    /// As many as there are columns; fewer where a fault says the rest.
    pub cells: Vec<String>,
    /// The fault.
    pub fault: Option<String>,
}

/// All of it.
#[derive(Debug)]
pub struct Report {
    /// In the order of the check.
    pub sections: Vec<Section>,
}

impl Report {
    /// How many answers are wrong.
    #[must_use]
    pub fn faults(&self) -> usize {
        self.sections.iter().flat_map(|section| &section.rows).filter(|row| row.fault.is_some()).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sections.iter().try_for_each(|section| writeln!(f, "{section}"))
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.cells.get(column));
            let widths = cells.map(|cell| cell.chars().count());
            widths.chain(self.columns.get(column).map(|head| head.chars().count())).max().unwrap_or_default()
        };
        let line = |cells: &mut dyn Iterator<Item = &str>| -> String {
            cells.enumerate().map(|(column, cell)| format!("  {cell:>width$}", width = width(column))).collect()
        };
        writeln!(f, "{}", line(&mut self.columns.iter().copied()))?;
        for row in &self.rows {
            let verdict = row.fault.as_ref().map_or_else(|| "ok".to_owned(), |fault| format!("WRONG: {fault}"));
            writeln!(f, "{}  {verdict}", line(&mut row.cells.iter().map(String::as_str)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_faults_are_counted() {
        let row = |a: &str, b: &str, fault: Option<&str>| Row {
            cells: vec![a.to_owned(), b.to_owned()],
            fault: fault.map(str::to_owned),
        };
        let rows = vec![row("leaf0", "1", None), row("l", "12345", Some("slow"))];
        let report = Report { sections: vec![Section { title: "rates", columns: &["from", "rate"], rows }] };
        assert_eq!(report.faults(), 1);
        let text = "rates\n   from   rate\n  leaf0      1  ok\n      l  12345  WRONG: slow\n\n";
        assert_eq!(report.to_string(), text);
    }
}
