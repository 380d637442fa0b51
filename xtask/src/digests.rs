//! `cargo xtask same-bits <rev>` and `cargo xtask bless --reason "…"`: the reference's digests now,
//! at another revision, and in the golden file.

use crate::arguments::Arguments;
use crate::repository::{output, root};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const GOLDEN: &str = "crates/conformance/golden/reference.txt";

/// Case name to digest.
type Digests = BTreeMap<String, String>;

/// Prints whether the reference produces the same bits at `<rev>`.
pub(crate) fn same_bits(arguments: &mut Arguments) -> Result<(), String> {
    let revision = arguments.word("a revision to compare with")?;
    arguments.finish()?;
    let here = parse(&digests_at(&root(), None)?);
    let there = {
        let worktree = Worktree::add(&revision)?;
        let target = root().join("target").join("same-bits");
        parse(&digests_at(&worktree.folder, Some(&target))?)
    };
    let comparison = compare(&there, &here);
    for line in &comparison.lines {
        println!("{line}");
    }
    println!(
        "{} cases equal, {} differ, {} are on one side only",
        comparison.equal, comparison.differ, comparison.alone
    );
    match (comparison.equal, comparison.differ) {
        (0, 0) => Err("no case exists on both sides: nothing was compared".to_string()),
        (_, 0) if comparison.gone > 0 => {
            Err(format!("{} cases are gone, so nothing compares their bits", comparison.gone))
        }
        (_, 0) => Ok(()),
        (_, differ) => Err(format!("{differ} cases have new bits: the numerics version has to rise")),
    }
}

/// Rewrites the golden file and appends the reason to its header.
pub(crate) fn bless(arguments: &mut Arguments) -> Result<(), String> {
    let reason = arguments.option("--reason")?.ok_or("bless needs --reason \"why the bits are new\"")?;
    arguments.finish()?;
    if reason.trim().is_empty() || reason.contains('\n') {
        return Err("the reason is one line".to_string());
    }
    let path = root().join(GOLDEN);
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    let lines = digests_at(&root(), None)?;
    let comparison = compare(&parse(&old), &parse(&lines));
    for line in &comparison.lines {
        println!("{line}");
    }
    std::fs::create_dir_all(path.parent().unwrap_or(&path)).map_err(|error| format!("{GOLDEN}: {error}"))?;
    std::fs::write(&path, blessed(&old, &lines, reason.trim())).map_err(|error| format!("{GOLDEN}: {error}"))?;
    println!("{} cases unchanged, {} changed, {} added or gone", comparison.equal, comparison.differ, comparison.alone);
    Ok(())
}

/// The new golden file: the old header with one more line, then the digests.
fn blessed(old: &str, lines: &str, reason: &str) -> String {
    let title =
        "# Digests of the reference, one case per line. Rewritten only by `cargo xtask bless`; the reasons so far:";
    let mut header: Vec<&str> = old.lines().filter(|line| line.starts_with('#')).collect();
    if header.is_empty() {
        header.push(title);
    }
    format!("{}\n# {}. {reason}\n{lines}", header.join("\n"), header.len())
}

/// Lines `digest name`, as printed by the conformance crate.
fn digests_at(folder: &Path, target: Option<&Path>) -> Result<String, String> {
    let mut arguments = vec!["run", "--quiet", "--release", "--package", "isobit-conformance", "--bin", "digests"];
    let target = target.map(|target| target.display().to_string());
    if let Some(target) = &target {
        arguments.extend(["--target-dir", target]);
    }
    output(folder, "cargo", &arguments)
}

fn parse(lines: &str) -> Digests {
    let pairs = lines.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' '));
    pairs.map(|(digest, name)| (name.to_string(), digest.to_string())).collect()
}

#[derive(Default)]
struct Comparison {
    lines: Vec<String>,
    equal: usize,
    differ: usize,
    alone: usize,
    gone: usize,
}

fn compare(old: &Digests, new: &Digests) -> Comparison {
    let mut comparison = Comparison::default();
    for (name, digest) in old {
        match new.get(name) {
            Some(same) if same == digest => comparison.equal += 1,
            Some(other) => {
                comparison.differ += 1;
                comparison.lines.push(format!("differs: {name}: {digest} was, {other} is"));
            }
            None => {
                comparison.alone += 1;
                comparison.gone += 1;
                comparison.lines.push(format!("gone:    {name}"));
            }
        }
    }
    for name in new.keys().filter(|name| !old.contains_key(*name)) {
        comparison.alone += 1;
        comparison.lines.push(format!("added:   {name}"));
    }
    comparison
}

/// Another revision, checked out beside this one during the lifetime of the value.
struct Worktree {
    folder: PathBuf,
}

impl Worktree {
    fn add(revision: &str) -> Result<Self, String> {
        let folder = std::env::temp_dir().join(format!("isobit-same-bits-{}", std::process::id()));
        output(&root(), "git", &["worktree", "add", "--quiet", "--detach", &folder.display().to_string(), revision])?;
        Ok(Self { folder })
    }
}

impl Drop for Worktree {
    fn drop(&mut self) {
        let removed = output(&root(), "git", &["worktree", "remove", "--force", &self.folder.display().to_string()]);
        if let Err(error) = removed {
            eprintln!("warning: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison_counts_each_kind() {
        let (old, new) = (parse("# x\n1 a\n2 b c\n3 d\n"), parse("1 a\n4 b c\n5 e\n"));
        let comparison = compare(&old, &new);
        assert_eq!((comparison.equal, comparison.differ, comparison.alone), (1, 1, 2));
        assert_eq!(comparison.lines[0], "differs: b c: 2 was, 4 is");
    }

    #[test]
    fn blessing_keeps_the_log() {
        let first = blessed("", "1 a\n", "first");
        let second = blessed(&first, "2 a\n", "second");
        let tail: Vec<&str> = second.lines().skip(1).collect();
        assert_eq!(tail, ["# 1. first", "# 2. second", "2 a"]);
    }
}
