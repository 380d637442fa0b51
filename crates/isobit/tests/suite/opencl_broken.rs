//! An OpenCL driver that crashes, aborts or hangs while it is loaded: it is named, and everything
//! else goes on. Drivers are loaded in a child process first.
#![cfg(unix)]

use crate::model_folder::{Folder, Ran, Shape, finished};
use isobit_conformance::skip;
use std::process::Command;

/// What a driver does when it is loaded, and what is said of it.
const DRIVERS: [(&str, &str, &str); 3] = [
    ("crashes", "*(volatile int *)0 = 0;", "an OpenCL driver crashes while it lists its devices (signal: 11"),
    ("aborts", "abort();", "an OpenCL driver crashes while it lists its devices (signal: 6"),
    ("hangs", "sleep(1000);", "an OpenCL driver hangs: no answer for 5 seconds"),
];

#[test]
fn a_driver_that_breaks_takes_nothing_along() {
    let folder = Folder::new(Shape::TINY);
    let said = |variable: Option<&str>, arguments: &[&str]| -> Ran {
        let mut command = folder.command(arguments);
        command.envs(variable.map(|folder| ("OCL_ICD_VENDORS", folder)));
        finished(command.output().expect("the program starts"))
    };
    if said(None, &["devices"]).out.contains("no OpenCL library found") {
        let missing = ("opencl".to_string(), "no OpenCL library".to_string());
        return skip("opencl_broken::a_driver_that_breaks_takes_nothing_along", &[missing]);
    }
    for (name, does, expected) in DRIVERS {
        let source = format!(
            "#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void f(void) {{ {does} }}\n"
        );
        folder.put(&format!("{name}.c"), source);
        let library = folder.path(&format!("{name}.so"));
        // The linker of every Rust build on this system.
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(folder.path(&format!("{name}.c")));
        assert!(compiler.status().expect("a C compiler").success());
        std::fs::create_dir(folder.path(&format!("{name}.d"))).expect("made");
        folder.put(&format!("{name}.d/driver.icd"), format!("{}\n", library.display()));
        let vendors = folder.path(&format!("{name}.d")).display().to_string();
        let doctor = said(Some(&vendors), &["doctor", "--json"]);
        assert!(doctor.code == 0 && doctor.out.contains(expected), "{name}: {}: {}", doctor.code, doctor.out);
        assert!(doctor.out.contains("device-cannot-be-used"), "{name}: a finding");
        let devices = said(Some(&vendors), &["devices"]);
        assert!(devices.code == 0 && devices.out.contains(expected), "{name}: {}", devices.out);
        let trained = said(Some(&vendors), &["train", "config.toml", "--device", "opencl:0"]);
        assert!(trained.code == 6 && trained.err.contains(expected), "{name}: {}", trained.err);
    }
}
