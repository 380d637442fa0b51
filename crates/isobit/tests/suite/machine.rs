//! What the machine does not have: cores for all threads, memory for all buffers; and what a
//! library may have changed in it.

use crate::model_folder::{Folder, Ran, Shape, finished};

#[test]
fn threads_are_bounded() {
    let folder = Folder::new(Shape::TINY);
    let eval = ["eval", "--model", "model", "--data", "data.jsonl", "--threads"];
    for count in ["18446744073709551615", "99999999999", "1025"] {
        folder.run(&[&eval[..], &[count]].concat()).says(2, &["threads are requested", "1024", "hint: "]);
    }
    folder.train("out", &["threads=4096"]).says(2, &["threads", "0 to 1024"]);
    assert!(!folder.has("out"));
    assert_eq!(folder.run(&[&eval[..], &["1024"]].concat()).code, 0);
}

/// More threads than cores would wait for each other at every op.
#[test]
fn no_more_threads_than_cores_are_started() {
    let folder = Folder::new(Shape::TINY);
    let ran =
        folder.run(&["bench", "step", "--model", "tiny", "--seq", "4", "--steps", "1", "--threads", "128", "--json"]);
    #[expect(clippy::disallowed_methods, reason = "what the program is held against")]
    let cores = std::thread::available_parallelism().map_or(128, std::num::NonZero::get);
    assert_eq!(ran.json()[0]["threads"], cores.min(128), "{}", ran.err);
    folder.trained("one", &["max_steps=3", "threads=1"]);
    folder.trained("many", &["max_steps=3", "threads=128"]);
    folder.same("one", "many");
}

/// The program with a limit on its address space, in KiB.
#[cfg(target_os = "linux")]
fn limited(folder: &Folder, kib: usize, arguments: &[&str]) -> Ran {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("ulimit -v {kib} && exec \"$@\""), "sh", env!("CARGO_BIN_EXE_isobit")]);
    command.args(arguments).current_dir(folder.path(""));
    finished(command.output().expect("a shell"))
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_do_not_start_are_an_error() {
    let folder = Folder::new(Shape::TINY);
    let bench = ["bench", "kernels", "--op", "add", "--shape", "4x4", "--runs", "1", "--threads", "1024"];
    limited(&folder, 400_000, &bench).says(4, &["error: the system started ", " of 1024 threads: ", "hint: "]);
    // Comparing needs no thread but its own.
    folder.trained("run", &["max_steps=1"]);
    assert_eq!(limited(&folder, 400_000, &["diff", "run", "run", "--threads", "1024"]).code, 0);
}

/// Small requests end the process where they are made, large ones are passed on as an error: both
/// say how much was asked for.
#[cfg(target_os = "linux")]
#[test]
fn memory_that_is_not_there_is_an_error_with_its_size() {
    let folder = Folder::new(Shape::TINY);
    folder.put("data.jsonl", format!("{{\"prompt\":\"1\",\"completion\":\"{}\"}}\n", "+23".repeat(160)).repeat(400));
    let train = ["train", "config.toml", "-q", "--set", "max_steps=1", "--set", "eval.val_set_size=0", "--set"];
    let wide = ["max_seq_length=512", "--set", "training.micro_batch_size=400", "--set"];
    let kept = ["training.gradient_checkpointing=none", "--set"];
    let run = |kib, output: &str, more: &[&str]| {
        let output = format!("output_dir={output}");
        limited(&folder, kib, &[&train[..], &wide, &kept, &[&output], more].concat())
    };
    for kib in [500_000, 600_000, 700_000] {
        let ran = run(kib, "insisted", &["--no-plan"]);
        ran.says(4, &["error: out of memory: the system refused ", " bytes", "hint: "]);
        // The plan says so before anything is read.
        run(kib, "planned", &[]).says(4, &["error: this run needs ", "`ulimit -v`", "--no-plan"]);
        assert!(!folder.has("planned"));
    }
}

/// Audits hold the model a second time, which a run must have the memory for before it starts.
#[cfg(target_os = "linux")]
#[test]
fn audits_must_fit_beside_their_run() {
    let folder = Folder::new(Shape::TINY);
    let wide = ["--set", "max_seq_length=512", "--set", "training.micro_batch_size=400", "--set"];
    let kept = ["training.gradient_checkpointing=none", "--set", "eval.val_set_size=0"];
    let plan = folder.run(&[&["plan", "config.toml", "--json"], &wide[..], &kept].concat());
    let needed = plan.json()[0]["needed_bytes"].as_u64().expect("a sum");
    let kib = needed as usize * 3 / 2 / 1024 + 100_000;
    limited(&folder, kib, &[&["plan", "config.toml"], &wide[..], &kept].concat()).says(0, &[]);
    let train = ["train", "config.toml", "--set", "output_dir=audited", "--audit-every", "1"];
    let ran = limited(&folder, kib, &[&train[..], &wide, &kept].concat());
    let refused = ["this run needs ", " and its audits ", "(`ulimit -v`)", "leave out --audit-every"];
    ran.says(4, &[&refused[..], &["`--no-plan`"]].concat());
    assert!(!folder.has("audited"));
    let plan = ["plan", "config.toml", "--audit-every", "1"];
    limited(&folder, kib, &[&plan[..], &wide, &kept].concat()).says(4, &refused);
    let fits = folder.run(&[&plan[..], &wide, &kept].concat());
    fits.says(0, &[]);
    assert!(fits.out.contains("audits fit: ") && fits.out.contains(", on top of the run's "), "{}", fits.out);
    folder.run(&[&plan[..], &["--audit-on", "cuda:63"]].concat()).says(6, &["cuda:63"]);
    let elsewhere = [&plan[..], &["--device", "mi100"]].concat();
    folder.run(&elsewhere).says(2, &["audits are planned for devices of this machine"]);
}

/// A library whose start-up routine changes the rounding mode and flushes subnormal numbers, as
/// `-ffast-math` links one.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn a_preloaded_library_that_changes_rounding_changes_no_bit() {
    let folder = Folder::new(Shape::TINY);
    // At the start, and again in every call that opens a file.
    let source = "#define _GNU_SOURCE\n#include <dlfcn.h>\n\
                  __attribute__((constructor)) static void f(void) { unsigned s = 0x1f80 | 0x8040 | 0x4000; \
                  __asm__ volatile(\"ldmxcsr %0\" : : \"m\"(s)); }\n\
                  int open64(const char *p, int o, int m) { f(); \
                  return ((int (*)(const char *, int, int))dlsym(RTLD_NEXT, \"open64\"))(p, o, m); }";
    folder.put("rounding.c", source);
    // The linker of every Rust build on this system.
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o", "rounding.so", "rounding.c", "-ldl"]).current_dir(folder.path(""));
    assert!(compiler.status().expect("a C compiler").success());
    let train = |output: &str, library: &str| {
        let set = format!("output_dir={output}");
        let mut command = folder.command(&["train", "config.toml", "--set", &set, "--set", "threads=2"]);
        let ran = finished(command.env("LD_PRELOAD", library).output().expect("the program starts"));
        assert_eq!(ran.code, 0, "{}", ran.err);
    };
    train("plain", "");
    train("disturbed", &folder.path("rounding.so").display().to_string());
    folder.same("plain", "disturbed");
}

/// Less stack than a command line and a plan need (`ulimit -s`), which only a thread can have then.
#[cfg(target_os = "linux")]
#[test]
fn a_small_stack_is_enough() {
    let folder = Folder::new(Shape::TINY);
    for (kib, limits) in [(128, "-S"), (128, ""), (256, "")] {
        for program in ["train config.toml --set output_dir=out", "doctor"] {
            let script = format!("ulimit {limits} -s {kib} && rm -rf out && exec \"$0\" {program}");
            let mut command = std::process::Command::new("sh");
            command.args(["-c", &script, env!("CARGO_BIN_EXE_isobit")]).current_dir(folder.path(""));
            let ran = finished(command.output().expect("a shell"));
            assert_eq!(ran.code, 0, "{script}: {}", ran.err);
        }
    }
}
