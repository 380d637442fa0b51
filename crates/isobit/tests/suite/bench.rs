//! `isobit bench` from the outside: what it prints, what it refuses, and with which exit code.

use crate::model_folder::{Folder, Shape};
use std::io::Write;
use std::process::{Command, Output, Stdio};

fn isobit(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_isobit")).args(arguments).output().expect("the program starts")
}

/// Exit code and standard error of a call that must fail without a panic and without results.
fn refused(arguments: &[&str]) -> (i32, String) {
    let output = isobit(arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
    (output.status.code().expect("no signal"), stderr)
}

#[test]
fn json_lines_have_the_promised_fields() {
    let output =
        isobit(&["bench", "kernels", "--json", "--op", "add", "--shape", "512x896", "--runs", "2", "--threads", "3"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 1);
    for field in ["schema", "op", "path", "profile", "shape", "threads", "gflops", "ms", "ms_median"] {
        assert!(lines[0].get(field).is_some(), "field {field} in {text}");
    }
    assert_eq!(lines[0]["schema"], "isobit.bench.kernels/1");
    assert_eq!(lines[0]["threads"], 3);
    assert!(lines[0]["ms"].as_f64().expect("a number") > 0.0);
}

#[test]
fn usage_errors_are_2_with_a_hint() {
    for (arguments, wanted) in [
        (&["bench", "kernels", "--op", "nonsense"][..], "no case"),
        (&["bench", "kernels", "--path", "sse9"], "unknown path"),
        (&["bench", "kernels", "--profile", "x9"], "unknown profile"),
        (&["bench", "kernels", "--threads", "0"], "0"),
        (&["bench", "kernels", "--device", "vulkan:0"], "unknown device"),
        (&["bench", "kernels", "--device", "opencl"], "lacks a device number"),
        (&["bench", "kernels", "--device", "cuda:0", "--path", "avx2"], "cannot be used with"),
        (&["bench", "kernels", "--runs", "0"], "0"),
        (&["bench", "kernel"], "kernel"),
        (&[], "Usage"),
    ] {
        let (code, stderr) = refused(arguments);
        assert_eq!(code, 2, "{arguments:?}: {stderr}");
        assert!(stderr.contains(wanted), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_path_the_machine_lacks_is_6() {
    let missing: Vec<_> = isobit_kernels::Path::ALL.into_iter().filter(|path| !path.is_available()).collect();
    for path in &missing {
        let (code, stderr) = refused(&["bench", "kernels", "--path", path.name()]);
        assert_eq!(code, 6, "{stderr}");
        assert!(stderr.contains("hint: it has: scalar"), "{stderr}");
    }
    if missing.is_empty() {
        // Nothing to refuse here: the machine has every path.
        assert_eq!(isobit_kernels::Path::available().len(), isobit_kernels::Path::ALL.len());
    }
}

fn serve(requests: &str) -> Output {
    fed(&["bench", "kernels", "--serve"], requests)
}

/// The program with something on its standard input.
fn fed(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_isobit"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(input.as_bytes()).expect("the program reads");
    drop(stdin);
    child.wait_with_output().expect("the program ends")
}

#[test]
fn served_requests_are_answered_line_by_line() {
    let output = serve("add 33x65 x2 best 2\nadd 33x65 x2 best 2\nproduct_forward 3x40x70 x3 scalar 1\n");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 3);
}

#[test]
fn steps_are_served_line_by_line() {
    let step = ["bench", "step", "--model", "tiny", "--batch", "2", "--seq", "16"];
    let output = fed(&[&step[..], &["--serve"]].concat(), "\n\n\n");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let losses: Vec<f64> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON")["loss"].as_f64().expect("a loss"))
        .collect();
    assert!(losses.len() == 3 && losses[2] < losses[0], "one model trains on: {losses:?}");
    assert_eq!(fed(&[&step[..], &["--serve"]].concat(), "").stdout, b"", "nothing is asked for");
    assert_eq!(refused(&[&step[..], &["--serve", "--steps", "2"]].concat()).0, 2);
}

/// The rows, the model and the settings of a config: the loss is that of training.
#[test]
fn a_config_is_measured() {
    let folder = Folder::new(Shape::TINY);
    let step = ["bench", "step", "--config", "config.toml", "--steps", "1", "--json", "--set"];
    let ran = folder.run(&[&step[..], &["learning_rate=1e-4"]].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    let line = &ran.json()[0];
    assert_eq!((&line["model"], &line["batch"], &line["threads"]), (&"model".into(), &8.into(), &1.into()));
    assert_eq!((&line["checkpointing"], &line["device"]), (&"full".into(), &"cpu".into()));
    assert_eq!(line["micro_batch"], 4, "the split is said");
    // Rows of the data, not of the longest length.
    assert!(line["seq"].as_u64().is_some_and(|seq| (2..64).contains(&seq)), "{line}");
    let other = ["training.micro_batch_size=1", "training.gradient_accumulation_steps=8"];
    let other = [other[0], "--set", other[1], "--set", "training.gradient_checkpointing=none"];
    let other = &folder.run(&[&step[..], &other].concat()).json()[0];
    assert_eq!((&other["loss"], &other["checkpointing"]), (&line["loss"], &"none".into()), "same bits");
    assert_eq!((&other["batch"], &other["micro_batch"]), (&8.into(), &1.into()));
    folder.run(&["bench", "step", "--config", "config.toml", "--model", "tiny"]).says(2, &["cannot be used with"]);
    folder.run(&["bench", "step", "--set", "seed=1"]).says(2, &["--config"]);
    folder.run(&["bench", "step", "--config", "nowhere.toml"]).says(2, &["nowhere.toml"]);
    folder.run(&[&step[..], &["base_model=nowhere"]].concat()).says(2, &["nowhere"]);
}

#[test]
fn hostile_requests_are_refused() {
    for request in [
        "add",
        "add 33x65 x2 best 0",
        "add 33x65 x2 best -1",
        "add 0x5 x2 best 1",
        "add 99999999999999999999x5 x2 best 1",
        "add 1048576x1048576 x2 best 1",
        "product_forward 1048576x1048576x1048576 x2 best 1",
        "attention 1048576x1024x1x256 x2 best 1",
        "attention 16x3x2x64 x2 best 1",
        "attention 16x2x2x257 x2 best 1",
        "low_rank_outer 4x4x65 x2 best 1",
        "rope 4x4x3 x2 best 1",
        "\u{0}",
    ] {
        let output = serve(&format!("{request}\n"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{request}: {stderr}");
        assert!(stderr.starts_with("error: ") && !stderr.contains("panicked"), "{request}: {stderr}");
    }
}

#[test]
fn a_device_the_machine_lacks_is_6() {
    for device in ["opencl:63", "cuda:63"] {
        let (code, stderr) = refused(&["bench", "kernels", "--device", device]);
        assert_eq!(code, 6, "{stderr}");
        assert!(stderr.contains(device) && stderr.contains("hint: `isobit devices`"), "{stderr}");
    }
}
