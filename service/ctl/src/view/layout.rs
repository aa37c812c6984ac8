//! Layout of `mccsctl watch`: tables, and how much of each the terminal has room for.

use std::fmt::Write as _;

/// How much room there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Characters of a line.
    pub columns: usize,
    /// Lines.
    pub lines: usize,
}

/// Lines of a section, at least: an empty one, its heads, a row, and how many more there are.
const SECTION_LINES_MIN: usize = 4;

/// A table, with what is left out of it.
pub(super) struct Section {
    /// An empty line, heads, rows.
    lines: Vec<String>,
    more: usize,
    /// Their name.
    of: &'static str,
}

impl Section {
    fn len(&self) -> usize {
        self.lines.len() + usize::from(self.more > 0)
    }

    /// Its first lines, and how many there are more.
    fn into_lines(mut self, room: usize) -> Vec<String> {
        if self.len() > room {
            let kept = room.saturating_sub(1).min(self.lines.len());
            self.more += self.lines.len() - kept;
            self.lines.truncate(kept);
        }
        if self.more > 0 {
            self.lines.push(format!("and {} more{}", self.more, self.of));
        }
        self.lines
    }
}

/// Cuts sections so that all are seen, if there is room for some of each: those that are short leave theirs to the others. Last ones go where
/// there is not.
pub(super) fn share(mut sections: Vec<Section>, mut room: usize) -> Vec<String> {
    let is_all = sections.iter().map(Section::len).sum::<usize>() <= room;
    let mut gone = 0;
    while !is_all
        && sections.len() > 1
        && room.saturating_sub(usize::from(gone > 0)) < sections.len() * SECTION_LINES_MIN
    {
        gone += sections.pop().map_or(0, |section| section.len());
    }
    room = room.saturating_sub(usize::from(gone > 0));
    let mut lengths: Vec<usize> = sections.iter().map(Section::len).collect();
    lengths.sort_unstable();
    // Room of each: more than an equal share, as far as short ones do not need theirs.
    let (mut left, mut each) = (room, usize::MAX);
    for (at, length) in lengths.iter().enumerate() {
        each = left / (lengths.len() - at);
        if *length > each {
            break;
        }
        (left, each) = (left - length, usize::MAX);
    }
    let mut lines: Vec<String> = sections.into_iter().flat_map(|section| section.into_lines(each)).collect();
    if gone > 0 {
        lines.push(format!("({gone} more lines)"));
    }
    lines
}

/// Cuts lines, and leaves those out for which there is no room, saying so.
pub(super) fn fit(lines: &[String], size: Size) -> String {
    let shown = if lines.len() > size.lines { size.lines.saturating_sub(1) } else { lines.len() };
    let cut = |line: &str| line.chars().take(size.columns).collect::<String>().trim_end().to_owned();
    let mut fitting: Vec<String> = lines[..shown].iter().map(|line| cut(line)).collect();
    if shown < lines.len() {
        fitting.push(cut(&format!("({} more lines)", lines.len() - shown)));
    }
    fitting.join("\n")
}

/// Lines of a table under their heads, which are as wide as the widest entry. The first `left` columns are words. `more` rows are not among
/// them. Nothing, where there are no rows.
pub(super) fn table(
    left: usize,
    heads: &[&str],
    rows: &[Vec<String>],
    more: usize,
    of: &'static str,
) -> Option<Section> {
    if rows.is_empty() {
        return None;
    }
    let width = |at: usize| {
        let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count());
        cells.chain([heads[at].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
    let mut lines = vec![String::new()];
    for row in [&heads].into_iter().chain(rows) {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if at == 0 { "" } else { "  " };
            let _ = if at < left { write!(line, "{gap}{cell:<width$}") } else { write!(line, "{gap}{cell:>width$}") };
        }
        lines.push(line);
    }
    Some(Section { lines, more, of })
}
