//! `isobit devices` from the outside: the CPU is always there, and everything else is a device or a
//! reason.

use std::process::Command;

fn isobit(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_isobit")).args(arguments).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn json_lines_have_the_promised_fields() {
    let text = isobit(&["devices", "--json"]);
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines[0]["device"], "cpu");
    assert!(lines.len() >= 4, "the processor, OpenCL, CUDA and HIP each have a line: {text}");
    for line in &lines {
        assert_eq!(line["schema"], "isobit.devices/1");
        for field in ["device", "name", "memory_bytes", "units", "runtime", "ready", "reason"] {
            assert!(line.get(field).is_some(), "field {field} in {text}");
        }
        assert_eq!(line["ready"] == true, line["reason"].is_null(), "ready, or a reason: {line}");
    }
}

#[test]
fn the_table_names_every_interface() {
    let text = isobit(&["devices"]);
    for name in ["cpu", "opencl", "cuda", "hip"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name} in {text}");
    }
}
