//! `isobit demo` tells its story to the end, and the hash is the one every machine must give, also
//! for whoever trains what it keeps.

use crate::snapshots;
use isobit_conformance::in_own_process;
use std::path::Path;
use std::process::Command;

/// As the README has it.
const HASH: &str = "c34bde7d9cfeb85e30ab61654bb8e877";

/// What it prints is a snapshot, which is compared in the current folder: one for the process.
#[test]
fn the_demo_gives_the_hash_of_every_machine() {
    let test = concat!(module_path!(), "::the_demo_gives_the_hash_of_every_machine");
    let held = tempfile::tempdir().expect("a temporary folder");
    let prepare = |command: &mut Command| {
        command.current_dir(held.path());
    };
    in_own_process(test, prepare, || {
        snapshots::check(&["demo".to_string()]);
        let mut train = Command::new(env!("CARGO_BIN_EXE_isobit"));
        let output = train.args(["train", "demo.toml"]).current_dir("kept").output().expect("the program starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let adapter = Path::new("kept/run/final/adapter_model.safetensors");
        let hash = isobit_proof::Hash::of_file(adapter).expect("an adapter");
        assert_eq!(&hash.to_string()[..32], HASH);
    });
}
