//! Planted mistakes: recorded runs, changed as if the program forgot a sync or did things in the
//! wrong order. The simulation must find each; otherwise its silence means nothing.

use super::trace::Op;
use std::path::Path;

pub(crate) type Mistake = (&'static str, fn(&[Op]) -> Vec<Op>);

pub(crate) const MISTAKES: [Mistake; 8] = [
    ("no file is synced", |ops| without(ops, |op| matches!(op, Op::SyncFile(_)))),
    ("no folder is synced", |ops| without(ops, |op| matches!(op, Op::SyncFolder(_)))),
    ("the optimizer's state is not synced", |ops| without_sync_before(ops, "optimizer.safetensors")),
    ("the metrics are not synced", |ops| without(ops, |op| is_sync_of(op, "metrics.jsonl"))),
    ("the chain is not synced", |ops| without(ops, |op| is_sync_of(op, "chain.jsonl"))),
    ("the run folder is not synced", |ops| without(ops, |op| *op == Op::SyncFolder("".into()))),
    ("latest.json before its checkpoint", pointer_first),
    ("pruned before the new checkpoint", prune_first),
];

fn without(ops: &[Op], forgotten: impl Fn(&Op) -> bool) -> Vec<Op> {
    ops.iter().filter(|op| !forgotten(op)).cloned().collect()
}

fn is_sync_of(op: &Op, name: &str) -> bool {
    matches!(op, Op::SyncFile(path) if path.ends_with(name))
}

/// Without the sync of files that are then renamed to `name`.
fn without_sync_before(ops: &[Op], name: &str) -> Vec<Op> {
    let partial =
        |path: &Path| ops.iter().any(|op| matches!(op, Op::Rename(from, to) if from == path && to.ends_with(name)));
    without(ops, |op| matches!(op, Op::SyncFile(path) if partial(path)))
}

/// The renames that publish checkpoints.
fn publications(ops: &[Op]) -> Vec<usize> {
    let is_checkpoint = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("checkpoint-")
    };
    (0..ops.len()).filter(|at| matches!(&ops[*at], Op::Rename(_, to) if is_checkpoint(to))).collect()
}

/// Moves `block` before `at`.
fn moved(ops: &[Op], block: std::ops::Range<usize>, at: usize) -> Vec<Op> {
    [&ops[..at], &ops[block.clone()], &ops[at..block.start], &ops[block.end..]].concat()
}

/// The pointer's file is written, renamed and synced before the rename of the checkpoint.
fn pointer_first(ops: &[Op]) -> Vec<Op> {
    publications(ops).into_iter().rev().fold(ops.to_vec(), |ops, at| {
        let is_pointer = |op: &Op| matches!(op, Op::Rename(_, to) if to.ends_with("latest.json"));
        let Some(named) = ops[at..].iter().position(is_pointer).map(|after| at + after) else { return ops };
        // Created, written, synced, renamed; then the folder is synced.
        moved(&ops, named - 3..named + 2, at)
    })
}

/// Old checkpoints are removed before the new one is named. Nothing moves past the next one.
fn prune_first(ops: &[Op]) -> Vec<Op> {
    publications(ops).into_iter().fold(ops.to_vec(), |ops, at| {
        let next = publications(&ops).into_iter().find(|other| *other > at).unwrap_or(ops.len());
        let leaves = |op: &Op| matches!(op, Op::Rename(from, to) if from.to_string_lossy().contains("/checkpoint-") && to.to_string_lossy().contains(".removed."));
        let Some(first) = ops[at..next].iter().position(leaves).map(|after| at + after) else { return ops };
        // Until the folder itself is removed.
        let Some(last) = ops[first..next].iter().position(|op| matches!(op, Op::RemoveFolder(_))) else { return ops };
        moved(&ops, first..first + last + 1, at)
    })
}
