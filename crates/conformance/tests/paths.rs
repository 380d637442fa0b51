//! Which paths and devices this machine lets the suite test. Its own harness, so that a skip is seen and counted, never a silent
//! pass. `ISOBIT_REQUIRE=opencl` makes a skip of what it names (a path, an interface) a failure.
#![expect(clippy::print_stdout, reason = "a report")]

use isobit_conformance::{Absent, devices};
use isobit_kernels::op::Add;
use isobit_kernels::{Cpu, Device, Gpu, Path};
use std::process::ExitCode;

#[expect(clippy::disallowed_methods, reason = "a build server says here what must not be skipped")]
fn main() -> ExitCode {
    let required = std::env::var("ISOBIT_REQUIRE").unwrap_or_default();
    let mut count = Count { passed: 0, failed: 0, skipped: 0, required: required.split(',').collect() };
    for path in Path::ALL {
        let made = Cpu::new(1, path);
        match (path.is_available(), made.is_ok()) {
            (true, true) => count.tested(path.name()),
            (false, false) => count.skipped(path.name(), "this machine does not have it"),
            (available, made) => count.failed(path.name(), &format!("available {available}, made {made}")),
        }
    }
    for (name, device) in devices() {
        match device {
            Ok(gpu) => match survives_refusal(&gpu) {
                Ok(()) => count.tested(&name),
                Err(why) => count.failed(&name, &why),
            },
            Err(Absent::Missing(why)) => count.skipped(&name, &why),
            Err(Absent::Broken(why)) => count.failed(&name, &why),
        }
    }
    println!("{} passed, {} failed, {} skipped", count.passed, count.failed, count.skipped);
    if count.failed == 0 && count.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A device that is asked for more memory than there is says so where the result comes back, and does nothing after.
fn survives_refusal(gpu: &Gpu) -> Result<(), String> {
    let before = gpu.upload(&[1.0f32, 2.0]);
    let mut sum = gpu.zeros::<f32>(2);
    let _refused = gpu.zeros::<f32>(1 << 46);
    gpu.run(Add { y: &mut sum, a: &before, b: &before });
    match gpu.download(&sum) {
        Err(failure) if failure.to_string().contains("bytes") => Ok(()),
        Err(failure) => Err(format!("an unclear refusal: {failure}")),
        Ok(_) => Err("256 TiB were granted".to_string()),
    }
}

struct Count<'a> {
    passed: usize,
    failed: usize,
    skipped: usize,
    required: Vec<&'a str>,
}

impl Count<'_> {
    fn tested(&mut self, name: &str) {
        println!("{name} ... tested by every case");
        self.passed += 1;
    }

    fn failed(&mut self, name: &str, why: &str) {
        println!("{name} ... FAILED: {why}");
        self.failed += 1;
    }

    fn skipped(&mut self, name: &str, why: &str) {
        if self.required.contains(&name.split(':').next().unwrap_or(name)) {
            return self.failed(name, &format!("required, but skipped: {why}"));
        }
        println!("{name} ... skipped: {why}");
        self.skipped += 1;
    }
}
