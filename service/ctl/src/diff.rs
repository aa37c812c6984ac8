//! `mccsctl policy diff`: what a policy would change. Marks: `~` a communicator that changes, `-` a
//! line that goes, `+` one that comes.

use std::collections::BTreeSet;

use mccs_controller::messages::answer::{DiffView, PolicyDiff};
use mccs_controller::pace::HostPace;

use crate::policy::strategy;

/// Changes of every communicator.
pub fn print(PolicyDiff { communicators: all, not_enforced }: &PolicyDiff) {
    not_enforced.iter().for_each(|what| say!("decided, not enforced: {what}"));
    if !all.iter().any(|view| view.changes) {
        say!("nothing would change");
    }
    all.iter().for_each(communicator);
}

fn communicator(view: &DiffView) {
    let mark = if view.changes { '~' } else { ' ' };
    let who = format!("{mark} communicator {}, tenant {}", view.name, view.tenant);
    match &view.after {
        Err(reason) => say!("{who}: left as it is: {reason}"),
        Ok(after) if view.changes_strategy => {
            say!("{who}");
            for (mark, line) in marked(&strategy(&view.before), &strategy(after)) {
                say!("  {mark} {line}");
            }
        }
        Ok(_) => {
            let why = if view.is_pinned { ", as it is pinned" } else { "" };
            let what = if view.changes { "its rings and flows stay" } else { "stays" };
            say!("{who}: {what}{why}");
        }
    }
    for (host, now, then) in paces(&view.paces_before, &view.paces_after) {
        say!("  - from {host}: {now}");
        say!("  + from {host}: {then}");
    }
    view.not_enforced.iter().for_each(|what| say!("    decided, not enforced: {what}"));
}

/// Hosts whose flows would leave otherwise than now: how they do, and how they would.
fn paces<'a>(
    before: &'a [(String, HostPace)],
    after: &'a [(String, HostPace)],
) -> impl Iterator<Item = (&'a String, String, String)> {
    let hosts: BTreeSet<&String> = before.iter().chain(after).map(|(host, _)| host).collect();
    let of = |paces: &[(String, HostPace)], host: &String| {
        let pace = paces.iter().find(|(other, _)| other == host).map(|(_, pace)| pace.to_string());
        pace.unwrap_or_else(|| "as they like".to_owned())
    };
    let both = move |host| (host, of(before, host), of(after, host));
    hosts.into_iter().map(both).filter(|(_, now, then)| now != then)
}

/// Lines of both in order: those that stay (` `), go (`-`) and come (`+`), with as many that stay as there can be.
fn marked<'a>(before: &'a [String], after: &'a [String]) -> Vec<(char, &'a str)> {
    // Lines that can stay, of the rest of both from there on.
    let mut stay = vec![vec![0_usize; after.len() + 1]; before.len() + 1];
    for (i, old) in before.iter().enumerate().rev() {
        for (j, new) in after.iter().enumerate().rev() {
            stay[i][j] = if old == new { stay[i + 1][j + 1] + 1 } else { stay[i + 1][j].max(stay[i][j + 1]) };
        }
    }
    let (mut i, mut j, mut lines) = (0, 0, Vec::new());
    while i < before.len() || j < after.len() {
        let (old, new) = (before.get(i), after.get(j));
        if let (Some(old), Some(new)) = (old, new)
            && old == new
        {
            lines.push((' ', old.as_str()));
            (i, j) = (i + 1, j + 1);
        } else if let Some(old) = old.filter(|_| j >= after.len() || stay[i + 1][j] >= stay[i][j + 1]) {
            lines.push(('-', old.as_str()));
            i += 1;
        } else if let Some(new) = new {
            lines.push(('+', new.as_str()));
            j += 1;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_stay_go_and_come_are_marked() {
        let lines = |text: &str| text.split(' ').filter(|line| !line.is_empty()).map(str::to_owned).collect::<Vec<_>>();
        for (before, after, expected) in [
            ("a b c", "a x c", " a -b +x  c"),
            ("a b", "a b", " a  b"),
            ("", "a", "+a"),
            ("a b", "", "-a -b"),
            ("a b c d", "b d e", "-a  b -c  d +e"),
        ] {
            let (before, after) = (lines(before), lines(after));
            let told: Vec<String> =
                marked(&before, &after).into_iter().map(|(mark, line)| format!("{mark}{line}")).collect();
            assert_eq!(told.join(" "), expected);
        }
    }
}
