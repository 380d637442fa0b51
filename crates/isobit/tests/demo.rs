//! `isobit demo` tells its story to the end, and the hash is the one every machine must give.

use std::process::Command;

#[test]
fn the_demo_gives_the_hash_of_every_machine() {
    let output = Command::new(env!("CARGO_BIN_EXE_isobit")).arg("demo").output().expect("the program starts");
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
}
