//! Division, square root and integer division of `gpu/exact.h` do not depend on the device's
//! estimates: the header itself, compiled by the host's C compiler, with estimates moved by several
//! ULP, gives the host's own results. Code that trusts an estimate, as compilers emit it, does not.

use isobit_conformance::{report, skip};
use std::io::Write;
use std::process::{Command, Stdio};

/// The dialect of a host's C compiler, the device header, and the program.
const SOURCE: [&str; 3] = [
    include_str!("../exact_division.h"),
    include_str!("../../../kernels/gpu/exact.h"),
    include_str!("../exact_division.c"),
];

#[test]
fn estimates_do_not_move_the_bits() {
    let program = std::env::temp_dir().join(format!("isobit-exact-division-{}", std::process::id()));
    let compiler = Command::new("cc")
        .args(["-x", "c", "-O2", "-ffp-contract=off", "-", "-lm", "-o"])
        .arg(&program)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut compiler = match compiler {
        Ok(compiler) => compiler,
        Err(error) => return skip("exact division", &[("cc".to_string(), error.to_string())]),
    };
    let mut input = compiler.stdin.take().expect("a pipe");
    input.write_all(SOURCE.concat().as_bytes()).expect("the compiler reads its source");
    drop(input);
    let compiled = compiler.wait_with_output().expect("the compiler ends");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output();
    std::fs::remove_file(&program).expect("the program is removed");
    let ran = ran.expect("the program starts");
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{text}");
    report(&format!("exact division: {text}"));
}
