//! `cargo xtask amd-run`: every conformance case that is small enough, on emulated AMD cards, both
//! dialects, plain and with adversarial seeds, and code objects of clang and hipRTC.

use crate::amd_audit::{self, in_parallel};
use crate::arguments::Arguments;
use crate::repository::{command, now, root};
use isobit_gcn::Toolchain;
use std::sync::Mutex;

const DEVICES: [&str; 2] = ["gfx906", "gfx908"];
/// Devices of which one seed is run.
const FURTHER: [&str; 2] = ["gfx90a", "gfx942"];
const DIALECTS: [&str; 2] = ["hip", "opencl"];
const CONFORM: &str = "target/release/conform";
/// What the jobs run: a build during the run must not change it.
const COPY: &str = "target/release/conform-amd-run";

/// One run of `conform`: its arguments.
type Job = Vec<String>;

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let require = arguments.flag("--require");
    let threads = arguments.number("--threads", 2)?;
    let seeds = arguments.number("--seeds", 5)?;
    let work = arguments.number("--work", 0)?;
    arguments.finish()?;
    if isobit_gcn::compiler().is_none() {
        println!("0 runs, 1 skipped: {}", amd_audit::NO_COMPILER);
        return if require { Err(amd_audit::NO_COMPILER.to_string()) } else { Ok(()) };
    }
    let build = ["build", "--release", "--package", "isobit-conformance", "--bin", "conform"];
    let built = command(&root(), "cargo", &build).status().map_err(|error| format!("cargo: {error}"))?;
    if !built.success() {
        return Err("conform does not build".to_string());
    }
    std::fs::copy(root().join(CONFORM), root().join(COPY)).map_err(|error| format!("{COPY}: {error}"))?;
    let start = now();
    let (jobs, skipped) = jobs(seeds, work);
    for skip in &skipped {
        println!("skipped: {skip}");
    }
    if require && !skipped.is_empty() {
        return Err(skipped.join("; "));
    }
    let failed = all(&jobs, threads);
    println!(
        "{} runs, {failed} with differences or failures, {} toolchains skipped, {:.0} s",
        jobs.len(),
        skipped.len(),
        start.elapsed().as_secs_f64()
    );
    if failed == 0 { Ok(()) } else { Err(format!("{failed} runs found differences")) }
}

/// The seeds of both dialects, then code objects; and the toolchains that are missing.
fn jobs(seeds: usize, work: usize) -> (Vec<Job>, Vec<String>) {
    let (mut jobs, mut skipped): (Vec<Job>, Vec<String>) = (Vec::new(), Vec::new());
    let mut add = |device: &str, rest: &[&str]| {
        let mut job = vec!["--on".to_string(), device.to_string()];
        job.extend(rest.iter().map(|word| (*word).to_string()));
        if work > 0 {
            job.extend(["--work".to_string(), work.to_string()]);
        }
        jobs.push(job);
    };
    for seed in 0..=seeds {
        for device in DEVICES {
            for dialect in DIALECTS {
                add(device, &["--dialect", dialect, "--seed", &seed.to_string()]);
            }
        }
    }
    for device in FURTHER {
        add(device, &["--seed", "1"]);
    }
    for toolchain in [Toolchain::CodeObject, Toolchain::HipRtc] {
        match toolchain.unavailable_because() {
            Some(why) => skipped.push(format!("{}: {why}", toolchain.name())),
            None => DEVICES.iter().for_each(|device| add(device, &["--toolchain", toolchain.name()])),
        }
    }
    (jobs, skipped)
}

/// Runs the jobs and prints what each reports; how many failed.
fn all(jobs: &[Job], threads: usize) -> usize {
    let printing = Mutex::new(());
    let passed = in_parallel(jobs, threads, |job| {
        let start = now();
        let line: Vec<&str> = job.iter().map(String::as_str).collect();
        let (text, passed) = match command(&root(), COPY, &line).output() {
            Ok(output) => {
                let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
                (report(&stdout, &stderr), output.status.success())
            }
            Err(error) => (format!("{COPY}: {error}"), false),
        };
        let _alone = printing.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        println!("{text}, {:.0} s", start.elapsed().as_secs_f64());
        passed
    });
    passed.iter().filter(|passed| !**passed).count()
}

/// Differences and the summary, without the names of what was left out; the error if there is no
/// summary.
fn report(stdout: &str, stderr: &str) -> String {
    let lines: Vec<&str> = stdout.lines().filter(|line| !line.starts_with("left out")).collect();
    if lines.is_empty() {
        stderr.lines().last().unwrap_or("nothing was compared").to_string()
    } else {
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_seed_on_every_device_in_both_dialects() {
        let (jobs, skipped) = jobs(5, 100);
        assert_eq!(jobs.len(), 2 * 2 * 6 + 2 + 2 * (2 - skipped.len()));
        assert_eq!(jobs[0], ["--on", "gfx906", "--dialect", "hip", "--seed", "0", "--work", "100"]);
        let distinct: std::collections::BTreeSet<_> = jobs.iter().collect();
        assert_eq!(distinct.len(), jobs.len());
    }

    #[test]
    fn names_of_what_was_left_out_are_not_repeated() {
        assert_eq!(report("a difference\nleft out, too much work: x\nthe summary\n", ""), "a difference\nthe summary");
        assert_eq!(report("", "warning\nerror: no clang\n"), "error: no clang");
    }
}
