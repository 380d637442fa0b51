//! What must not be skipped. `ISOBIT_REQUIRE` lists paths and interfaces (`avx2,opencl`): if one of
//! them is missing, a test fails that would otherwise be skipped. Skips are printed past the test
//! harness's output capture.

use crate::{Absent, devices};
use isobit_kernels::gpu::Gpu;
use std::io::Write;

/// Whether the build server requires this path, interface or device (`opencl` covers `opencl:0`).
#[expect(clippy::disallowed_methods, reason = "a build server says here what must not be skipped")]
pub fn is_required(name: &str) -> bool {
    let required = std::env::var("ISOBIT_REQUIRE").unwrap_or_default();
    is_named(&required, name)
}

fn is_named(required: &str, name: &str) -> bool {
    required.split(',').any(|required| required == name || required == name.split(':').next().unwrap_or(name))
}

/// Reports that a test, or part of one, did not run: a line for every reason, and their count.
/// Fails if anything missing is required. Each reason is a name and why it is missing.
pub fn skip(test: &str, missing: &[(String, String)]) {
    let required: Vec<&(String, String)> = missing.iter().filter(|(name, _)| is_required(name)).collect();
    assert!(required.is_empty(), "{test}: ISOBIT_REQUIRE names what is missing: {required:?}");
    if !missing.is_empty() {
        let reasons = missing.iter().map(|(name, why)| format!("skipped: {test}: {name}: {why}\n"));
        let count = format!("{test}: {} skipped\n", missing.len());
        report(&reasons.chain([count]).collect::<Vec<_>>().concat());
    }
}

/// Prints past the test harness's capture, which hides the output of passing tests.
pub fn report(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Every device of this machine; missing ones are skips of `test`. A device that exists but fails
/// is a failure.
pub fn devices_or_skips(test: &str) -> Vec<Gpu> {
    named_devices_or_skips(test).into_iter().map(|(_, gpu)| gpu).collect()
}

/// The same with their names: for tests that open them again on other threads.
pub fn named_devices_or_skips(test: &str) -> Vec<(String, Gpu)> {
    let (mut present, mut missing) = (Vec::new(), Vec::new());
    for (name, device) in devices() {
        match device {
            Ok(gpu) => present.push((name, gpu)),
            Err(Absent::Missing(why)) => missing.push((name, why)),
            Err(Absent::Broken(why)) => panic!("{test}: {name} is there and fails: {why}"),
        }
    }
    skip(test, &missing);
    present
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_what_is_required() {
        assert!(is_named("opencl", "opencl") && is_named("avx2,opencl", "opencl:1") && is_named("cuda:0", "cuda:0"));
        assert!(!is_named("", "opencl") && !is_named("opencl", "cuda:0") && !is_named("cuda:0", "cuda:1"));
    }

    #[test]
    fn what_is_required_may_not_be_missing() {
        let test = concat!(module_path!(), "::what_is_required_may_not_be_missing");
        let require = |command: &mut std::process::Command| {
            command.env("ISOBIT_REQUIRE", "opencl");
        };
        crate::in_own_process(test, require, || {
            let missing = |name: &str| [(name.to_string(), "no device".to_string())];
            assert!(std::panic::catch_unwind(|| skip("a test", &missing("opencl"))).is_err());
            assert!(std::panic::catch_unwind(|| skip("a test", &missing("opencl:0"))).is_err());
            skip("a test", &missing("cuda"));
        });
    }
}
