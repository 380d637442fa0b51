//! `cargo xtask laws`: the laws that whole runs keep, each tried on the release binary with the
//! demo's model, as one table: law, cases, differing bits. A bit differs if it does in a
//! checkpoint, in the final folder, in the chain or in the metrics without timing. `laws_here.rs`
//! has the laws that no flag of the program reaches.

use crate::arguments::Arguments;
use crate::laws_here;
use crate::repository::{output, root};
use isobit_training::metrics::without_timing;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A short run that saves and evaluates.
const RUN: [&str; 5] = ["max_steps=12", "save_steps=3", "val_set_size=6", "eval_steps=4", "threads=1"];

/// Laws, and the settings of each of their cases.
const LAWS: [(&str, &[&[&str]]); 6] = [
    ("1 run again", &[&[]]),
    ("2 threads: 1, 2, 3", &[&["threads=2"], &["threads=3"]]),
    (
        "4 micro-batches: 4x4, 16x1, 2x8, 1x16",
        &[
            &["micro_batch_size=16", "gradient_accumulation_steps=1"],
            &["micro_batch_size=2", "gradient_accumulation_steps=8"],
            &["micro_batch_size=1", "gradient_accumulation_steps=16"],
        ],
    ),
    (
        "5 recomputation: full, selective, none",
        &[&["gradient_checkpointing=none"], &["gradient_checkpointing=selective"]],
    ),
    ("7 data workers: 1, 2, 5", &[&["data_workers=2"], &["data_workers=5"]]),
    ("8 layers over one, two, three CPUs", &[&["device=[\"cpu\",\"cpu\"]"], &["device=[\"cpu\",\"cpu\",\"cpu\"]"]]),
];

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let program = arguments.option("--isobit")?.map_or(root().join("target/release/isobit"), PathBuf::from);
    arguments.finish()?;
    let scene = std::env::temp_dir().join(format!("isobit-laws-{}", std::process::id()));
    let kept = scene.display().to_string();
    output(&root(), &program.display().to_string(), &["demo", "--keep", &kept])?;
    let result = Bench { program, scene: scene.clone() }.table();
    std::fs::remove_dir_all(&scene).map_err(|error| format!("{}: {error}", scene.display()))?;
    result
}

struct Bench {
    program: PathBuf,
    scene: PathBuf,
}

impl Bench {
    fn table(&self) -> Result<(), String> {
        self.train("expected", &[])?;
        println!("| law | cases | differing bits |\n|---|---|---|");
        let mut all = 0;
        for (law, cases) in LAWS {
            let mut differing = 0;
            for (number, settings) in cases.iter().enumerate() {
                let run = format!("{}-{number}", &law[..1]);
                self.train(&run, settings)?;
                differing += self.differing(&run)?;
            }
            all += row(law, cases.len(), differing);
        }
        let paths = laws_here::paths(&self.scene, &RUN)?;
        let on_paths = paths.iter().map(|run| self.differing(run)).sum::<Result<u64, _>>()?;
        all += row("3 SIMD paths: every one that the machine has, scalar included", paths.len(), on_paths);
        for (number, kill_at) in ["checkpoint-3", "checkpoint-6", "checkpoint-9"].into_iter().enumerate() {
            self.train_and_kill(&format!("6-{number}"), kill_at)?;
        }
        let killed = (0..3).map(|number| self.differing(&format!("6-{number}"))).sum::<Result<u64, _>>()?;
        all += row("6 killed and resumed", 3, killed);
        all += row("9 ranks: 1, 2, 3, 4 (`gradient_groups = 4`)", 3, self.ranks()?);
        all += self.cards("10 CPU = GPU: the first CUDA, HIP and OpenCL device of the machine")?;
        all += row("11 evaluation in batches of 4, 1, 3, 16", 3, self.evaluations()?);
        let (prefixes, differing) = laws_here::cache(&self.scene, &RUN)?;
        all += row("11 generation with a cache against the full forward pass, by prefixes", prefixes, differing);
        if all == 0 { Ok(()) } else { Err(format!("{all} bits differ")) }
    }

    fn command(&self, run: &str, settings: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["train", "demo.toml", "-q", "--set", &format!("output_dir={run}")]);
        for setting in RUN.iter().chain(settings) {
            command.args(["--set", setting]);
        }
        command.current_dir(&self.scene).stdin(Stdio::null());
        command
    }

    fn train(&self, run: &str, settings: &[&str]) -> Result<(), String> {
        let status = self.command(run, settings).status().map_err(|error| error.to_string())?;
        if status.success() { Ok(()) } else { Err(format!("{run}: {settings:?}: {status}")) }
    }

    /// Kills a run once it has saved a checkpoint, then resumes it.
    fn train_and_kill(&self, run: &str, at: &str) -> Result<(), String> {
        let failed = |error: std::io::Error| error.to_string();
        let mut child = self.command(run, &[]).spawn().map_err(failed)?;
        while !self.scene.join(run).join(at).is_dir() && child.try_wait().map_err(failed)?.is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().map_err(failed)?;
        if child.wait().map_err(failed)?.success() {
            return Err(format!("{run}: it ended before it was killed"));
        }
        let status = self.command(run, &[]).arg("--resume").status().map_err(failed)?;
        if status.success() { Ok(()) } else { Err(format!("{run}: {status}")) }
    }

    /// Differing bits of runs on 2 to 4 ranks. Gradient groups are part of the arithmetic: one
    /// process has the same.
    fn ranks(&self) -> Result<u64, String> {
        let settings = [&RUN[..], &["gradient_groups=4"]].concat();
        laws_here::ranks(&self.scene, "9-1", 1, &settings)?;
        let mut differing = 0;
        for count in 2..=4 {
            let run = format!("9-{count}");
            laws_here::ranks(&self.scene, &run, count, &settings)?;
            differing += self.differing_from("9-1", &run)?;
        }
        Ok(differing)
    }

    /// Runs on the first device of each kind that the machine has, and prints the row. One that is
    /// listed and fails is an error, whatever its exit code.
    fn cards(&self, law: &str) -> Result<u64, String> {
        let (mut count, mut differing) = (0, 0);
        let listed = output(&self.scene, &self.program.display().to_string(), &["devices", "--json"])?;
        for device in ["cuda:0", "hip:0", "opencl:0"] {
            if !is_listed(&listed, device) {
                eprintln!("skipped: {device}");
                continue;
            }
            let run = device.replace(':', "-");
            self.train(&run, &[&format!("device={device}")])?;
            (count, differing) = (count + 1, differing + self.differing(&run)?);
        }
        if count == 0 {
            println!("| {law} | skipped: no device | |");
            return Ok(0);
        }
        Ok(row(law, count, differing))
    }

    /// Differing bits of the results of evaluations in other batches.
    fn evaluations(&self) -> Result<u64, String> {
        let program = self.program.display().to_string();
        let evaluated = |size: &str| {
            let words = ["eval", "--model", "model", "--adapter", "expected", "--data", "pirate.jsonl", "--json"];
            output(&self.scene, &program, &[&words[..], &["--micro-batch-size", size]].concat())
        };
        let expected = evaluated("4")?;
        let others = ["1", "3", "16"].into_iter().map(evaluated).collect::<Result<Vec<_>, _>>()?;
        Ok(others.iter().map(|other| bits(expected.as_bytes(), other.as_bytes())).sum())
    }

    fn differing(&self, run: &str) -> Result<u64, String> {
        self.differing_from("expected", run)
    }

    fn differing_from(&self, expected: &str, run: &str) -> Result<u64, String> {
        let [expected, found] = [expected, run].map(|run| contents(&self.scene.join(run)));
        let (expected, found) = (expected?, found?);
        let names = expected.keys().chain(found.keys().filter(|name| !expected.contains_key(*name)));
        let none = Vec::new();
        let of = |name: &String| bits(expected.get(name).unwrap_or(&none), found.get(name).unwrap_or(&none));
        Ok(names.map(of).sum())
    }
}

/// Whether `isobit devices --json` has a line of this device.
fn is_listed(lines: &str, device: &str) -> bool {
    let mut all = lines.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    all.any(|line| line["device"] == device)
}

fn row(law: &str, cases: usize, differing: u64) -> u64 {
    println!("| {law} | {cases} | {differing} |");
    differing
}

/// Bits that differ; those of a longer file all do.
fn bits(a: &[u8], b: &[u8]) -> u64 {
    let shared: u64 = a.iter().zip(b).map(|(a, b)| u64::from((a ^ b).count_ones())).sum();
    shared + 8 * a.len().abs_diff(b.len()) as u64
}

/// What equal runs share: checkpoints, the final folder, the chain, and metrics without timing.
fn contents(run: &Path) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let mut all = BTreeMap::new();
    let failed = |error: std::io::Error| format!("{}: {error}", run.display());
    for entry in std::fs::read_dir(run).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            for entry in std::fs::read_dir(&path).map_err(failed)? {
                let file = entry.map_err(failed)?.path();
                let inner = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                all.insert(format!("{name}/{inner}"), std::fs::read(file).map_err(failed)?);
            }
        } else if name == "chain.jsonl" {
            all.insert(name, std::fs::read(path).map_err(failed)?);
        } else if name == "metrics.jsonl" {
            let text = std::fs::read_to_string(path).map_err(failed)?;
            all.insert(name, text.lines().map(without_timing).collect::<String>().into_bytes());
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kind without a device has a line too, by the name of the kind.
    #[test]
    fn a_device_is_listed_by_its_number() {
        let lines = "{\"device\":\"cpu\",\"ready\":true}\n{\"device\":\"cuda\",\"ready\":false}\n\
                     {\"device\":\"opencl:0\",\"ready\":false}\n";
        let listed = ["cpu", "cuda:0", "hip:0", "opencl:0"].map(|device| is_listed(lines, device));
        assert_eq!(listed, [true, false, false, true]);
    }
}
