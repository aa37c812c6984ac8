//! Groups: operations that start together, as in NCCL. A group belongs to the thread that opens it.

use std::cell::RefCell;
use std::sync::Arc;

use mccs_ipc::command::{Command, FLAG_GROUP_CONTINUES, Opcode};

use crate::{Error, Stream};

#[derive(Default)]
struct Group {
    depth: u32,
    operations: Vec<(Stream, Command)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Opens a group: operations of this thread are collected until the matching [`group_end`]. Groups nest.
pub fn group_start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Closes a group. The outermost one enqueues what was collected: for each stream first the collectives in their order,
/// then all sends and receives, which start together.
///
/// # Errors
/// [`Error::InvalidArgument`] without a group, [`Error::ServiceGone`].
pub fn group_end() -> Result<(), Error> {
    let operations = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1).ok_or_else(|| Error::argument("group_end without group_start"))?;
        Ok::<_, Error>(if group.depth == 0 { std::mem::take(&mut group.operations) } else { Vec::new() })
    })?;
    let mut streams: Vec<(Stream, Vec<Command>)> = Vec::new();
    for (stream, command) in operations {
        match streams.iter_mut().find(|(known, _)| Arc::ptr_eq(&known.shared, &stream.shared)) {
            Some((_, commands)) => commands.push(command),
            None => streams.push((stream, vec![command])),
        }
    }
    for (stream, commands) in streams {
        let is_collective = |command: &Command| command.opcode == Opcode::Collective as u32;
        let (mut ordered, mut pairs): (Vec<_>, Vec<_>) = commands.into_iter().partition(is_collective);
        if let Some((_, all_but_last)) = pairs.split_last_mut() {
            all_but_last.iter_mut().for_each(|command| command.flags |= FLAG_GROUP_CONTINUES);
        }
        ordered.append(&mut pairs);
        stream.client.0.submit(&stream.shared, &mut ordered)?;
    }
    Ok(())
}

/// Enqueues an operation, or keeps it for the end of the group.
pub(crate) fn submit(stream: &Stream, command: Command) -> Result<(), Error> {
    let in_group = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.operations.push((stream.clone(), command));
        }
        group.depth > 0
    });
    if in_group { Ok(()) } else { stream.client.0.submit(&stream.shared, &mut [command]) }
}
