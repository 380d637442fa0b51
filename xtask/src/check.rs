//! `cargo xtask check`: what the build server runs, cheapest first. Stops at the first failure with
//! its exit code.

use crate::amd_audit;
use crate::amd_rates;
use crate::arguments::Arguments;
use crate::cuda_audit;
use crate::repository::{command, now, root};
use crate::tidy;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

/// How a step ended.
enum End {
    Passed,
    Skipped(String),
    Failed(u8),
}

type Step = (&'static str, fn() -> End);

const STEPS: [Step; 8] = [
    ("format", || cargo(&["fmt", "--all", "--check"])),
    ("tidy", tidy_step),
    ("lint", || cargo(&["clippy", "--workspace", "--all-targets", "--release", "--", "-D", "warnings"])),
    ("licences", deny_step),
    ("amd-audit", || with_clang(|compiler| amd_audit::audit(compiler, 2, false))),
    ("amd-rates", || with_clang(amd_rates::rates)),
    ("cuda-audit", cuda_audit_step),
    ("test", || cargo(&["test", "--release", "--workspace"])),
];

pub(crate) fn run(arguments: &mut Arguments) -> Result<ExitCode, String> {
    let fast = arguments.flag("--fast");
    arguments.finish()?;
    let mut done: Vec<(&str, End, Duration)> = Vec::new();
    for (name, step) in STEPS {
        eprintln!("== {name}");
        let start = now();
        let end = if fast && name == "test" { End::Skipped("--fast".to_string()) } else { step() };
        let failed = matches!(end, End::Failed(_));
        done.push((name, end, start.elapsed()));
        if failed {
            break;
        }
    }
    Ok(summary(&done))
}

fn summary(done: &[(&str, End, Duration)]) -> ExitCode {
    println!();
    let mut code = 0;
    for (name, end, time) in done {
        let text = match end {
            End::Passed => "passed".to_string(),
            End::Skipped(why) => format!("skipped: {why}"),
            End::Failed(with) => {
                code = *with;
                format!("FAILED with exit code {with}")
            }
        };
        println!("{name:<10} {:>7.1} s  {text}", time.as_secs_f64());
    }
    let skipped = done.iter().filter(|(_, end, _)| matches!(end, End::Skipped(_))).count();
    println!("{} of {} steps ran, {skipped} skipped", done.len() - skipped, STEPS.len());
    ExitCode::from(code)
}

fn cargo(arguments: &[&str]) -> End {
    match command(&root(), "cargo", arguments).status() {
        Ok(status) if status.success() => End::Passed,
        Ok(status) => End::Failed(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: cargo: {error}");
            End::Failed(1)
        }
    }
}

fn tidy_step() -> End {
    ended(tidy::run(&mut Arguments::new(std::iter::empty())))
}

fn with_clang(step: impl Fn(&str) -> Result<(), String>) -> End {
    match isobit_gcn::compiler() {
        Some(compiler) => ended(step(compiler)),
        None => End::Skipped(amd_audit::NO_COMPILER.to_string()),
    }
}

fn cuda_audit_step() -> End {
    match cuda_audit::compiler() {
        Ok(()) => ended(cuda_audit::audit()),
        Err(why) => End::Skipped(why),
    }
}

fn ended(result: Result<(), String>) -> End {
    match result {
        Ok(()) => End::Passed,
        Err(error) => {
            eprintln!("error: {error}");
            End::Failed(1)
        }
    }
}

/// The advisory database needs the network; the other checks do not.
fn deny_step() -> End {
    let mut version = command(&root(), "cargo", &["deny", "--version"]);
    let installed = version.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if installed {
        cargo(&["deny", "check", "bans", "licenses", "sources"])
    } else {
        End::Skipped("cargo-deny is not installed".to_string())
    }
}
