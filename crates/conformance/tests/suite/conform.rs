//! `conform` from the outside: what it refuses, and that the table keeps to the ops that are named.

use std::process::Command;

/// Exit code, standard output and standard error.
fn conform(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_conform")).args(arguments).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code().expect("no signal"), text(output.stdout), text(output.stderr))
}

#[test]
fn help_lists_every_option() {
    let (code, out, _) = conform(&["--help"]);
    assert_eq!(code, 0);
    // The arms of its `match`.
    let source = include_str!("../../src/bin/conform.rs");
    let arms = source.lines().filter_map(|line| line.trim().strip_prefix('"')?.split_once("\" =>"));
    let options: Vec<&str> = arms.map(|(option, _)| option).filter(|option| option.starts_with("--")).collect();
    assert!(options.len() >= 11 && options.contains(&"--toolchain"), "{options:?}");
    for option in options {
        assert!(out.contains(&format!("  {option} ")), "{option} in {out}");
    }
}

#[test]
fn refusals_have_their_exit_codes() {
    for (arguments, code, said) in [
        (&["linaer"][..], 2, "unknown op `linaer`: did you mean `linear`?"),
        (&["softmax"], 2, "the ops are linear, "),
        (&["--tabel"], 2, "unknown option `--tabel`"),
        (&["--on"], 2, "--on needs a value"),
        (&["--threads", "2"], 2, "--threads needs --path"),
        (&["--table", "--small"], 2, "--table goes with"),
        (&["--path", "scalar", "--on", "cuda"], 2, "--path goes without"),
        (&["add", "--on", "cuda:63"], 6, "cuda:63"),
        (&["add", "--on", "gfx907"], 6, "emulated cards are gfx906, gfx908, gfx90a, gfx942 or sm80"),
        (&["--on", "gfx907", "--seed", "1"], 2, "need an emulated card: --on gfx906, gfx908, gfx90a, gfx942 or sm80"),
        (
            &["add", "--table", "--on", "vulkan:0"],
            6,
            "no backend here has `vulkan:0` in its name: there are cpu/scalar",
        ),
    ] {
        let (found, _, err) = conform(arguments);
        assert!(found == code && err.contains(said), "{arguments:?}: {found}, {err}");
    }
}

#[test]
fn the_table_has_the_ops_and_backends_that_are_named() {
    let (code, out, _) = conform(&["add", "scale", "--table", "--on", "cpu/scalar"]);
    let table: Vec<&str> = out.lines().filter(|line| line.starts_with('|')).collect();
    assert_eq!((code, table[0]), (0, "| op | cases | reference | cpu/scalar |"), "{out}");
    let ops: Vec<&str> = table[2..].iter().map(|row| row.split(' ').nth(1).expect("a cell")).collect();
    assert_eq!(ops, ["add", "scale"]);
    // What is missing is not part of the table.
    assert!(out.lines().all(|line| line.starts_with('|') || line.starts_with("ops that differ")), "{out}");
}
