//! `cargo xtask memcheck`: small conformance cases under valgrind's memcheck, on the scalar and the
//! AVX2 path with one and two threads. It detects reads of uninitialised memory, out-of-bounds
//! accesses and leaks; valgrind does not support AVX-512. Any error fails, and so does any
//! difference from the reference except the one that valgrind itself causes: its `vfnmadd` (3.19)
//! gives −0 where a processor gives +0.

use crate::arguments::Arguments;
use crate::repository::{command, now, root};
use std::process::Stdio;

/// Valgrind's exit code for findings: not an exit code of `conform`.
const FOUND: &str = "99";

/// The message of `conform` for a `vfnmadd` under valgrind; natively it finds no difference.
const WRONG_ZERO: &str = ": 0e0 (0x00000000) wanted, -0e0 (0x80000000) given;";

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let ops = arguments.rest();
    if let Some(option) = ops.iter().find(|op| op.starts_with("--")) {
        return Err(format!("unknown argument `{option}`"));
    }
    let version = version().ok_or("valgrind is not installed: try `apt-get install valgrind`")?;
    let build = ["build", "--release", "--package", "isobit-conformance", "--bin", "conform"];
    let built = command(&root(), "cargo", &build).status().map_err(|error| format!("cargo: {error}"))?;
    if !built.success() {
        return Err("conform does not build".to_string());
    }
    println!("{version}");
    let start = now();
    for path in ["scalar", "avx2"] {
        for threads in ["1", "2"] {
            check(path, threads, &ops)?;
        }
    }
    println!("clean, {:.0} s in all", start.elapsed().as_secs_f64());
    Ok(())
}

fn version() -> Option<String> {
    let output = command(&root(), "valgrind", &["--version"]).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

fn check(path: &str, threads: &str, ops: &[String]) -> Result<(), String> {
    let start = now();
    let code = format!("--error-exitcode={FOUND}");
    // Memory still reachable at the end is not a leak: tables that live as long as the program. The
    // threads of a pool spin for each other, so they must take turns on valgrind's single lock.
    let mut line =
        vec!["--quiet", "--fair-sched=yes", &code, "--leak-check=full", "--show-leak-kinds=definite,indirect"];
    line.extend(["--errors-for-leak-kinds=definite,indirect", "target/release/conform"]);
    line.extend(["--small", "--path", path, "--threads", threads]);
    line.extend(ops.iter().map(String::as_str));
    let output = command(&root(), "valgrind", &line).output().map_err(|error| format!("valgrind: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said.lines().last().unwrap_or("nothing was compared");
    let differences = || said.lines().filter(|line| line.contains(" on cpu/"));
    let wrong_zeros = path == "avx2" && differences().all(|line| line.contains(WRONG_ZERO));
    if output.status.success() || (output.status.code() == Some(1) && differences().count() > 0 && wrong_zeros) {
        let whose = if output.status.success() { "" } else { ", all zeros of valgrind's" };
        println!("{path:<6} x{threads}: no memory error; {last}{whose}; {:.0} s", start.elapsed().as_secs_f64());
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(format!("memcheck on {path} with {threads} threads ended with {}\n{said}\n{told}", output.status))
}
