//! A HIP runtime that crashes, aborts, hangs or lies: the other devices are still listed, and a
//! message says what to do. The fake of `hip.rs` does so where a test says.
#![cfg(unix)]

use crate::hip::{Fake, hip_lines};
use crate::model_folder::{Folder, Shape, train_arguments};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Calls of opening a card, of the test of its arithmetic and of the copies after it.
const CALLS: [&str; 9] = [
    "constructor",
    "hipGetDeviceCount",
    "hipGetDeviceProperties",
    "hipDeviceGetAttribute",
    "hipMalloc",
    "hipModuleLoadData",
    "hipModuleLaunchKernel",
    "hipMemsetAsync",
    "hipHostRegister",
];

/// `train` with the fake.
fn training(fake: &Fake, folder: &Folder, device: &str) -> Command {
    let arguments = train_arguments("out", &[device]);
    let mut command = fake.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    command.current_dir(folder.path("")).stdin(Stdio::null());
    command
}

#[test]
fn a_runtime_that_crashes_takes_nothing_along() {
    let Some(fake) = Fake::new("hip_broken::a_runtime_that_crashes_takes_nothing_along", &[]) else { return };
    for call in CALLS {
        for (variable, signal) in [("FAKE_HIP_CRASHES", "SIGSEGV"), ("FAKE_HIP_ABORTS", "SIGABRT")] {
            let output = fake.with(variable, call).output().expect("the program starts");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.starts_with("cpu "), "{call}: {text}");
            let text = hip_lines(&output);
            for words in ["the HIP runtime (libamdhip64) crashed", signal, "reinstall it or remove it"] {
                assert!(text.contains(words), "{variable}={call}: {text}");
            }
        }
    }
    let aborted = Fake::says(fake.with("FAKE_HIP_ABORTS", "hipMalloc"));
    assert!(aborted.contains("hipMalloc: assertion failed"), "{aborted}");
    // At its end it has answered.
    let late = Fake::says(fake.with("FAKE_HIP_CRASHES", "destructor"));
    assert!(late.contains("hip:0     Fake Instinct 0: ready"), "{late}");
}

/// One that only prints has not answered.
#[test]
fn a_runtime_that_hangs_is_left() {
    let Some(fake) = Fake::new("hip_broken::a_runtime_that_hangs_is_left", &[]) else { return };
    let start = |(how, call): (&'static str, &str)| {
        let mut command = fake.with(how, call);
        command.env("ISOBIT_HIP_TIMEOUT", "1").env("ISOBIT_CACHE", "off");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let calls = [
        ("FAKE_HIP_HANGS", "constructor"),
        ("FAKE_HIP_HANGS", "hipGetDeviceCount"),
        ("FAKE_HIP_HANGS", "hipModuleLaunchKernel"),
        ("FAKE_HIP_HANGS", "hiprtcCompileProgram"),
        ("FAKE_HIP_FLOODS", "constructor"),
        ("FAKE_HIP_CHATS", "hipGetDeviceCount"),
    ];
    for (call, child) in calls.map(|call| (call, start(call))) {
        let text = hip_lines(&child.wait_with_output().expect("it ends"));
        for words in ["hung: no answer for 1 seconds", "reinstall it or remove it", "ISOBIT_HIP_TIMEOUT=3 waits"] {
            assert!(text.contains(words), "{call:?}: {text}");
        }
    }
}

#[test]
fn a_runtime_that_lies_is_not_believed() {
    let Some(fake) = Fake::new("hip_broken::a_runtime_that_lies_is_not_believed", &[]) else { return };
    let text = Fake::says(fake.with("FAKE_HIP_COUNT", "2000000000"));
    assert!(text.contains("2000000000 devices: it cannot be trusted"), "{text}");
}

/// A card that is named is refused with the reason; `auto` and `doctor` go on without it.
#[test]
fn commands_do_without_a_runtime_that_crashes() {
    let Some(fake) = Fake::new("hip_broken::commands_do_without_a_runtime_that_crashes", &[]) else { return };
    let ran = |arguments: &[&str]| {
        let mut command = fake.command(arguments);
        command.env("FAKE_HIP_CRASHES", "hipMalloc").env("OCL_ICD_VENDORS", fake.path("none"));
        let output = command.output().expect("the program starts");
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.code(), out, err)
    };
    let (code, _, err) = ran(&["bench", "kernels", "--device", "hip:0"]);
    assert!(code == Some(6) && err.contains("the HIP runtime (libamdhip64) crashed"), "{code:?} {err}");
    let (code, out, _) = ran(&["doctor"]);
    assert!(code == Some(0) && out.contains("the HIP runtime (libamdhip64) crashed"), "{code:?} {out}");
    // One that lists no card is a finding, too.
    let mut command = fake.command(&["doctor"]);
    command.env("FAKE_HIP_CRASHES", "constructor").env("OCL_ICD_VENDORS", fake.path("none"));
    let out = String::from_utf8(command.output().expect("the program starts").stdout).expect("text");
    assert!(
        out.contains(
            "warning: hip cannot be used [device-cannot-be-used]\n  why: the HIP runtime (libamdhip64) crashed"
        ),
        "{out}"
    );
    let folder = Folder::new(Shape::TINY);
    let mut command = training(&fake, &folder, "device=auto");
    command.env("FAKE_HIP_CRASHES", "hipMalloc").env("OCL_ICD_VENDORS", fake.path("none"));
    let output = command.output().expect("the program starts");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Its exit code is no answer of the program: 1 says that a difference was found.
#[test]
fn a_runtime_that_ends_the_program_is_named() {
    let Some(fake) = Fake::new("hip_broken::a_runtime_that_ends_the_program_is_named", &[]) else { return };
    let folder = Folder::new(Shape::TINY);
    let mut command = training(&fake, &folder, "device=hip:0");
    let output = command.env("FAKE_HIP_EXITS", "hipMalloc").output().expect("the program starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(6) && err.contains("a library ended the program: the driver of a device, or MPI"),
        "{err}"
    );
}

#[test]
fn without_an_amd_device_the_runtime_is_not_opened() {
    let test = "hip_broken::without_an_amd_device_the_runtime_is_not_opened";
    let Some(fake) = Fake::new(test, &[]) else { return };
    if Path::new("/dev/kfd").exists() {
        isobit_conformance::skip(test, &[("no AMD device".to_string(), "there is /dev/kfd".to_string())]);
        return;
    }
    let folder = Folder::new(Shape::TINY);
    let commands = [fake.command(&["devices"]), fake.command(&["doctor"]), training(&fake, &folder, "device=auto")];
    for (mut command, says) in commands.into_iter().zip(["there is no /dev/kfd", "there is no /dev/kfd", ""]) {
        command.env_remove("ISOBIT_HIP").env("FAKE_HIP_CRASHES", "constructor");
        let output = command.env("OCL_ICD_VENDORS", fake.path("none")).output().expect("the program starts");
        let out = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{out}{}", String::from_utf8_lossy(&output.stderr));
        assert!(out.contains(says), "{out}");
        assert_eq!(fake.count("opened"), 0, "{out}");
    }
    // Who names a card wants it opened.
    let mut command = fake.command(&["bench", "kernels", "--device", "hip:0"]);
    let output = command.env_remove("ISOBIT_HIP").env("FAKE_HIP_COUNT", "0").output().expect("the program starts");
    assert_eq!(output.status.code(), Some(6));
    assert!(fake.count("opened") > 0);
    let off = Fake::says(fake.with("ISOBIT_HIP", "off"));
    assert!(off.contains("ISOBIT_HIP=off leaves out HIP devices"), "{off}");
}

/// The first signal asks for the end of a step, which a compiler that hangs never lets come.
#[test]
fn a_compiler_that_hangs_does_not_keep_the_program() {
    let Some(fake) = Fake::new("hip_broken::a_compiler_that_hangs_does_not_keep_the_program", &[]) else { return };
    let folder = Folder::new(Shape::TINY);
    let mut command = training(&fake, &folder, "device=hip:0");
    command.env("FAKE_HIP_HANGS", "another program");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    while fake.count("another program") == 0 {
        assert!(child.try_wait().expect("a child").is_none(), "it ended before it compiled");
        std::thread::sleep(Duration::from_millis(20));
    }
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill").success());
    let output = child.wait_with_output().expect("it ends");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{err}");
    assert!(err.contains("stopped while a program was being compiled"), "{err}");
}
