//! HIP's host side without a card: a fake runtime (`tests/fake_hip`), compiled here, is found by
//! the loader like the real one. It runs the probe and nothing else, and fails where a test says
//! so.

use isobit_conformance::skip;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

/// The folder of the fake, of its log and of the cache.
pub(crate) struct Fake {
    folder: TempDir,
}

impl Fake {
    /// None, and a skip, if there is no C compiler.
    pub(crate) fn new(test: &str, options: &[&str]) -> Option<Self> {
        let fake = Self { folder: TempDir::new().expect("a folder") };
        fake.compile(test, "libamdhip64.so.7", "tests/fake_hip/fake_hip.c", options).then_some(fake)
    }

    /// Makes a library of a file of this crate; false, and a skip, if there is no C compiler.
    fn compile(&self, test: &str, library: &str, source: &str, options: &[&str]) -> bool {
        let mut command = Command::new("cc");
        command
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source]);
        match command.arg("-o").arg(self.path(library)).args(options).output() {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => {
                skip(test, &[("cc".to_string(), error.to_string())]);
                return false;
            }
        }
        true
    }

    /// With one more variable of the environment.
    pub(crate) fn with(&self, name: &'static str, value: &str) -> Command {
        let mut command = self.command(&["devices"]);
        command.env(name, value);
        command
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_isobit"));
        command.args(arguments).env("LD_LIBRARY_PATH", self.folder.path());
        for name in ["HSA_OVERRIDE_GFX_VERSION", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] {
            command.env_remove(name);
        }
        // There is no card, and so no device file.
        command.env("ISOBIT_HIP", "always");
        command.env("ISOBIT_CACHE", self.path("cache")).env("FAKE_HIP_LOG", self.path("log"));
        command
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The lines of `isobit devices` about HIP.
    pub(crate) fn says(mut command: Command) -> String {
        hip_lines(&command.output().expect("the program starts"))
    }

    /// How often the fake did something since the last question.
    pub(crate) fn count(&self, what: &str) -> usize {
        let text = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        text.lines().filter(|line| *line == what).count()
    }

    fn forget(&self) {
        std::fs::write(self.path("log"), "").expect("the log is emptied");
    }

    /// The one entry of the cache.
    fn entry(&self) -> PathBuf {
        let entries: Vec<_> = std::fs::read_dir(self.path("cache/hip")).expect("the cache").collect();
        assert_eq!(entries.len(), 1, "one entry, no temporary file: {entries:?}");
        entries.into_iter().next().expect("an entry").expect("an entry").path()
    }
}

pub(crate) fn hip_lines(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("hip")).collect();
    assert!(!lines.is_empty(), "{text}");
    lines.join("\n")
}

#[test]
fn a_card_is_listed_and_proven() {
    let Some(fake) = Fake::new("hip::a_card_is_listed_and_proven", &[]) else { return };
    let text = Fake::says(fake.command(&["devices"]));
    assert!(text.contains("hip:0     Fake Instinct 0: ready"), "{text}");
    assert!(text.contains("16.0 GiB, 60 compute units, HIP 6.2.41134, driver 6.2.41134, gfx906"), "{text}");
    assert_eq!([fake.count("compile"), fake.count("launch"), fake.count("load")], [1, 1, 1]);
    assert_eq!(fake.count("unload"), 1, "modules are unloaded");
    assert_eq!(fake.count("free"), 3, "both buffers of the probe, and that of the copies");
    assert_eq!([fake.count("lock"), fake.count("unlock")], [1, 1], "pages are unlocked");
    let two = Fake::says(fake.with("FAKE_HIP_COUNT", "2"));
    assert!(
        two.contains("hip:0     Fake Instinct 0: ready") && two.contains("hip:1     Fake Instinct 1: ready"),
        "{two}"
    );
}

/// The fake passes the probe and computes nothing else: a device that is here and fails.
#[test]
fn the_doctor_fails_a_card_that_does_not_give_the_bits() {
    let Some(fake) = Fake::new("hip::the_doctor_fails_a_card_that_does_not_give_the_bits", &[]) else { return };
    let output = fake
        .command(&["doctor", "--json"])
        .env("OCL_ICD_VENDORS", fake.path("none"))
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(6), "{}", String::from_utf8_lossy(&output.stdout));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one object");
    let devices = report["devices"].as_array().expect("devices");
    let card = devices.iter().find(|device| device["device"] == "hip:0").expect("the card");
    assert!(card["state"] == "failed" && card["reasons"].as_array().is_some_and(|all| !all.is_empty()), "{card}");
    assert!(devices.iter().any(|device| device["device"] == "cpu/scalar" && device["state"] == "conformant"));
    assert_eq!(report["findings"][0]["id"], "device-fails");
    // Without a card, and with one that cannot be used, there is nothing that fails.
    for (name, value, said) in [
        ("FAKE_HIP_COUNT", "0", "no findings"),
        ("FAKE_HIP_ARCHITECTURE", "gfx803", "hip:0 (Fake Instinct 0) cannot be used"),
    ] {
        let mut command = fake.command(&["doctor"]);
        let output =
            command.env("OCL_ICD_VENDORS", fake.path("none")).env(name, value).output().expect("the program starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert!(text.contains(said) && !text.contains("but fails"), "{text}");
    }
}

#[test]
fn properties_of_version_5_have_their_own_layout() {
    let Some(fake) = Fake::new("hip::properties_of_version_5_have_their_own_layout", &["-DOLD_LAYOUT"]) else { return };
    let text = Fake::says(fake.with("FAKE_HIP_VERSION", "50221153"));
    assert!(text.contains("ready") && text.contains("HIP 5.2.21153") && text.contains("gfx906"), "{text}");
}

#[test]
fn what_is_wrong_is_said_with_a_way_out() {
    let Some(fake) = Fake::new("hip::what_is_wrong_is_said_with_a_way_out", &[]) else { return };
    let rows: [(&str, &str, &[&str]); 13] = [
        ("FAKE_HIP_ARCHITECTURE", "gfx803", &["gfx803 is not supported", "opencl:N"]),
        ("FAKE_HIP_ARCHITECTURE", "sm_90", &["`sm_90`", "not one of AMD's"]),
        ("HSA_OVERRIDE_GFX_VERSION", "9.0.8", &["HSA_OVERRIDE_GFX_VERSION=9.0.8", "unset it"]),
        ("HIPRTC_COMPILE_OPTIONS_APPEND", "-ffast-math", &["HIPRTC_COMPILE_OPTIONS_APPEND", "unset it"]),
        ("FAKE_HIP_COUNT", "0", &["no AMD device"]),
        ("FAKE_HIP_FAILS", "hipGetDeviceCount", &["hipGetDeviceCount failed: a fake error", "999"]),
        ("FAKE_HIP_FAILS", "hipGetDeviceProperties", &["hipGetDeviceProperties failed", "hipErrorOfTheFake"]),
        ("FAKE_HIP_FAILS", "hipMalloc", &["hipMalloc of 4096 bytes failed: out of memory", "hipErrorOutOfMemory"]),
        ("FAKE_HIP_FAILS", "hipMemcpy", &["hipMemcpy", "failed"]),
        ("FAKE_HIP_FAILS", "hipSetDevice", &["hipSetDevice", "failed"]),
        ("FAKE_HIP_FAILS", "hiprtcCompileProgram", &["probe does not compile", "the log of the fake"]),
        ("FAKE_HIP_FAILS", "hipModuleLaunchKernel", &["hipModuleLaunchKernel", "failed"]),
        ("FAKE_HIP_FAILS", "arithmetic", &["it cannot give the bits", "division is not correctly rounded"]),
    ];
    for (name, value, words) in rows {
        let mut command = fake.with(name, value);
        command.env("ISOBIT_CACHE", "off");
        let text = Fake::says(command);
        assert!(!text.contains(": ready"), "{name}={value}: {text}");
        for word in words {
            assert!(text.contains(word), "{name}={value}: `{word}` is missing in: {text}");
        }
    }
    let mut old = fake.with("FAKE_HIP_VERSION", "50221153");
    old.env("FAKE_HIP_ARCHITECTURE", "gfx942");
    let text = Fake::says(old);
    assert!(text.contains("ROCm 5 does not know gfx942") && text.contains("install ROCm 6"), "{text}");
    // What `devices` lists, other commands refuse.
    let mut bench = fake.command(&["bench", "kernels", "--device", "hip:0"]);
    let ran = bench.env("FAKE_HIP_ARCHITECTURE", "gfx803").output().expect("the program starts");
    let message = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.code() == Some(6) && message.contains("gfx803 is not supported"), "{message}");
    let ran = fake.command(&["bench", "kernels", "--device", "hip:7"]).output().expect("the program starts");
    let message = String::from_utf8_lossy(&ran.stderr);
    assert!(
        ran.status.code() == Some(6) && message.contains("HIP has one device, number 0; there is no number 7"),
        "{message}"
    );
}

#[test]
fn a_function_that_is_missing_is_named() {
    let Some(fake) = Fake::new("hip::a_function_that_is_missing_is_named", &["-DWITHOUT_LAUNCH"]) else { return };
    let text = Fake::says(fake.command(&["devices"]));
    assert!(text.contains("the library has no hipModuleLaunchKernel"), "{text}");
}

#[test]
fn a_compiler_that_aborts_takes_nothing_along() {
    let Some(fake) = Fake::new("hip::a_compiler_that_aborts_takes_nothing_along", &[]) else { return };
    let text = Fake::says(fake.with("FAKE_HIP_FAILS", "abort"));
    assert!(text.contains("the compiler died") && text.contains("SIGABRT"), "{text}");
    assert!(text.contains("munmap_chunk(): invalid pointer") && text.contains("gfx906"), "{text}");
}

#[test]
fn programs_are_compiled_once() {
    let Some(fake) = Fake::new("hip::programs_are_compiled_once", &[]) else { return };
    let run = |name, value| {
        fake.forget();
        let text = Fake::says(fake.with(name, value));
        assert!(text.contains(": ready"), "{text}");
        fake.count("compile")
    };
    assert_eq!(run("FAKE_HIP_SALT", ""), 1);
    assert_eq!(run("FAKE_HIP_SALT", ""), 0, "from the cache");
    assert_eq!(run("ISOBIT_CACHE", "off"), 1);
    assert_eq!(run("ISOBIT_CACHE", "/dev/null"), 1, "no folder can be there");
    let entry = fake.entry();
    let good = std::fs::read(&entry).expect("an entry");
    for bad in [&good[..0], &good[..good.len() - 1], &[0; 200]] {
        std::fs::write(&entry, bad).expect("spoiled");
        assert_eq!(run("FAKE_HIP_SALT", ""), 1, "ignored");
        assert_eq!(std::fs::read(&entry).expect("an entry"), good, "and replaced");
    }
    // Whole, but not what the driver takes.
    assert_eq!(run("FAKE_HIP_SALT", "another"), 1);
    assert_eq!(fake.count("load"), 2, "refused, then compiled again");
    assert_eq!(run("FAKE_HIP_VERSION", "60300000"), 1, "another compiler");
}

#[test]
fn processes_that_compile_at_once_share_the_cache() {
    let Some(fake) = Fake::new("hip::processes_that_compile_at_once_share_the_cache", &[]) else { return };
    let start =
        |_| fake.command(&["devices"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let children: Vec<Child> = (0..4).map(start).collect();
    for child in children {
        let text = hip_lines(&child.wait_with_output().expect("it ends"));
        assert!(text.contains(": ready"), "{text}");
    }
    fake.entry();
    fake.forget();
    assert!(Fake::says(fake.command(&["devices"])).contains(": ready"));
    assert_eq!(fake.count("compile"), 0);
}

/// The library of `tools/hip_over_cuda` over a CUDA driver and an NVRTC that are fakes.
#[test]
fn hip_over_cuda_passes_every_call_on() {
    let test = "hip::hip_over_cuda_passes_every_call_on";
    let fake = Fake { folder: TempDir::new().expect("a folder") };
    let over = "../../tools/hip_over_cuda/hip_over_cuda.c";
    if !fake.compile(test, "libamdhip64.so.7", over, &["-ldl", "-lpthread"]) {
        return;
    }
    for library in ["libcuda.so.1", "libnvrtc.so"] {
        assert!(fake.compile(test, library, "tests/fake_hip/fake_cuda.c", &[]));
    }
    let text = Fake::says(fake.command(&["devices"]));
    assert!(text.contains("hip:0     Fake H200 0: ready"), "{text}");
    assert!(text.contains("8.0 GiB, 132 compute units, HIP 6.2.0, driver 6.2.0, gfx906"), "{text}");
    let calls = std::fs::read_to_string(fake.path("log")).expect("the log");
    let calls: Vec<&str> = calls.lines().collect();
    assert_eq!(calls, ["retain", "compile", "load", "launch", "unload", "free", "free", "free"]);
}
