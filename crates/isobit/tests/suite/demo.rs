//! `isobit demo` tells its story to the end, and the hash is the one every machine must give, also
//! for whoever trains what it keeps.

use std::process::Command;

/// As the README has it.
const HASH: &str = "c34bde7d9cfeb85e30ab61654bb8e877";

#[test]
fn the_demo_gives_the_hash_of_every_machine() {
    let held = tempfile::tempdir().expect("a temporary folder");
    let kept = held.path().join("kept");
    let mut demo = Command::new(env!("CARGO_BIN_EXE_isobit"));
    let output = demo.args(["demo", "--keep"]).arg(&kept).output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    for part in [
        "tuned: Ahoy, Anna!",
        "tuned: Fair winds, Paul.",
        "killed; the last checkpoint is checkpoint-",
        "first differing step ",
        "max=",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(text.matches("the same").count(), 2, "{text}");
    assert!(text.contains("The same bits as on every other machine."), "{text}");
    assert!(text.contains(&format!("adapter {HASH}")), "{text}");
    let mut train = Command::new(env!("CARGO_BIN_EXE_isobit"));
    let output = train.args(["train", "demo.toml"]).current_dir(&kept).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let hash = isobit_proof::Hash::of_file(&kept.join("run/final/adapter_model.safetensors")).expect("an adapter");
    assert_eq!(&hash.to_string()[..32], HASH);
}
