//! `isobit doctor` on this machine, whatever it has.

use crate::model_folder::{Folder, Shape, finished};
use std::path::Path;
use std::process::Command;

/// Without OpenCL, whose kernels may have to be compiled first.
fn quick(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = folder.command(arguments);
    command.env("OCL_ICD_VENDORS", folder.path("no-drivers"));
    command
}

/// A third of it on an idle machine at most; other tests run beside this one.
const SECONDS_MAX: u64 = 30;

#[expect(clippy::disallowed_types, reason = "the time is what is tested")]
#[test]
fn this_machine_is_examined() {
    let folder = Folder::new(Shape::TINY);
    let begun = std::time::Instant::now();
    let ran = folder.run(&["doctor", "--json"]);
    assert!(begun.elapsed().as_secs() < SECONDS_MAX, "{:?}", begun.elapsed());
    ran.says(0, &[]);
    let report = &ran.json()[0];
    assert_eq!(report["schema"], "isobit.doctor/1");
    assert_eq!(report["machine"]["float_state_changed"], false);
    assert!(report["machine"]["disk_available_bytes"].is_u64() && report["machine"]["sync_ms"].is_u64(), "{report}");
    let devices = report["devices"].as_array().expect("devices");
    let conformant: Vec<_> = devices.iter().filter(|device| device["state"] == "conformant").collect();
    assert!(conformant.iter().any(|device| device["device"] == "cpu/scalar"), "{devices:?}");
    // Whatever gives the bits gives one hash; a device that compiles for long has none yet.
    let one = |device: &&serde_json::Value| device["hash"].is_null() || device["hash"] == conformant[0]["hash"];
    assert!(conformant.iter().all(one) && conformant[0]["hash"].is_string(), "{devices:?}");
    assert!(report["soak"].is_null());
}

#[test]
fn a_soak_repeats_the_vectors() {
    let folder = Folder::new(Shape::TINY);
    let ran = finished(quick(&folder, &["doctor", "--json", "--soak", "1s"]).output().expect("the program starts"));
    let soak = &ran.json()[0]["soak"];
    assert!(soak["rounds"].as_u64() >= Some(1) && soak["wrong"].as_array().is_some_and(Vec::is_empty), "{soak}");
}

#[test]
fn a_python_environment_is_read_and_never_run() {
    let folder = Folder::new(Shape::TINY);
    let packages = "venv/lib/python3.13/site-packages/torch-2.5.1.dist-info";
    std::fs::create_dir_all(folder.path(packages)).expect("a folder");
    folder.put(&format!("{packages}/METADATA"), "Name: torch\nVersion: 2.5.1\n");
    std::fs::create_dir_all(folder.path("venv/bin")).expect("a folder");
    folder.put("venv/bin/python", "#!/bin/sh\ntouch ran\n");
    let ran = quick(&folder, &["doctor", "--python", "venv/bin/python"]).output().expect("the program starts");
    let ran = finished(ran);
    ran.says(0, &[]);
    for part in [
        "Python     3.13, 1 package in venv",
        "warning: Python 3.13 with PyTorch 2.5.1",
        "  do: ",
        "  source: pytorch/",
    ] {
        assert!(ran.out.contains(part), "{part} is missing in {}", ran.out);
    }
    assert!(!folder.has("ran"));
    folder.run(&["doctor", "--python", "model"]).says(2, &["site-packages", "hint: "]);
    folder.run(&["doctor", "--soak", "10"]).says(2, &["write 30s, 10m or 2h"]);
}

/// A preloaded library that changes rounding is found, and the vectors are right nevertheless.
#[cfg(target_os = "linux")]
#[test]
fn a_changed_float_state_is_told() {
    let folder = Folder::new(Shape::TINY);
    folder.put(
        "rounding.c",
        "#include <fenv.h>\n__attribute__((constructor)) static void change(void) { fesetround(FE_UPWARD); }\n",
    );
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o", "rounding.so", "rounding.c", "-lm"]).current_dir(folder.path(""));
    assert!(compiler.status().expect("a C compiler").success());
    let mut command = quick(&folder, &["doctor"]);
    let library = Path::new(&folder.path("rounding.so")).display().to_string();
    let ran = finished(command.env("LD_PRELOAD", library).output().expect("the program starts"));
    ran.says(0, &[]);
    assert!(ran.out.contains("[float-state]") && ran.out.contains("floats     was changed"), "{}", ran.out);
    assert!(ran.out.contains("cpu/scalar") && !ran.out.contains("FAILS"), "{}", ran.out);
}
