//! Which paths this machine lets the suite test. Its own harness, so that a skip is seen and counted, never a silent pass.
#![expect(clippy::print_stdout, reason = "a report")]

use isobit_kernels::{Cpu, Path};
use std::process::ExitCode;

fn main() -> ExitCode {
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for path in Path::ALL {
        let made = Cpu::new(1, path);
        match (path.is_available(), made.is_ok()) {
            (true, true) => {
                println!("path {path} ... tested by every case");
                passed += 1;
            }
            (false, false) => {
                println!("path {path} ... skipped: this machine does not have it");
                skipped += 1;
            }
            (available, made) => {
                println!("path {path} ... FAILED: available {available}, made {made}");
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
