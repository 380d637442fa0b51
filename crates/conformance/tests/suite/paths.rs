//! Which paths and devices this machine lets the suite test. The list is printed also where the
//! test passes, so that a skip is seen and counted. `ISOBIT_REQUIRE=opencl` makes a skip of what it
//! names (a path, an interface) a failure.

use isobit_conformance::{Absent, devices, is_required, report};
use isobit_kernels::op::Add;
use isobit_kernels::{Cpu, Device, Gpu, Path};
use std::fmt::Write;

#[test]
fn paths() {
    let mut count = Count::default();
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
    let Count { passed, failed, skipped, lines } = count;
    report(&format!("{lines}paths and devices: {passed} tested, {failed} failed, {skipped} skipped\n"));
    assert!(failed == 0 && passed > 0, "{lines}");
}

/// A device that is asked for more memory than there is says so where the result comes back, and
/// does nothing after.
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

#[derive(Default)]
struct Count {
    passed: usize,
    failed: usize,
    skipped: usize,
    lines: String,
}

impl Count {
    fn tested(&mut self, name: &str) {
        let _ = writeln!(self.lines, "{name} ... tested by every case");
        self.passed += 1;
    }

    fn failed(&mut self, name: &str, why: &str) {
        let _ = writeln!(self.lines, "{name} ... FAILED: {why}");
        self.failed += 1;
    }

    fn skipped(&mut self, name: &str, why: &str) {
        if is_required(name) {
            return self.failed(name, &format!("required, but skipped: {why}"));
        }
        let _ = writeln!(self.lines, "{name} ... skipped: {why}");
        self.skipped += 1;
    }
}
