//! No message sends anybody to a command that does not exist: every command between backticks in
//! the sources is held against `isobit --help`.

use std::path::Path;
use std::process::Command;

fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push((path.display().to_string(), std::fs::read_to_string(&path).expect("text")));
        }
    }
}

fn help(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_isobit")).args(arguments).output().expect("the program starts");
    assert!(output.status.success());
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Whether the list of commands has this one.
fn lists(help: &str, command: &str) -> bool {
    help.lines().any(|line| line.starts_with("  ") && line.split_whitespace().next() == Some(command))
}

#[test]
fn commands_that_messages_name_exist() {
    let mut all = Vec::new();
    for name in ["numerics", "kernels", "autograd", "models", "proof", "training", "isobit"] {
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src"), &mut all);
    }
    let top = help(&["--help"]);
    let mut named = 0;
    for (path, text) in &all {
        for rest in text.split("`isobit ").skip(1) {
            let words: Vec<&str> = rest.split(['`', '\n']).next().unwrap_or_default().split_whitespace().collect();
            let [command, more @ ..] = &words[..] else { panic!("{path}: no command") };
            if command.contains(['{', '…']) {
                continue;
            }
            assert!(lists(&top, command), "{path}: there is no `isobit {command}`");
            let mut own = help(&[command, "--help"]);
            if let (true, Some(second)) = (own.contains("<COMMAND>"), more.first()) {
                assert!(lists(&own, second), "{path}: there is no `isobit {command} {second}`");
                own = help(&[command, second, "--help"]);
            }
            for flag in more.iter().filter(|word| word.starts_with("--")) {
                assert!(own.contains(flag), "{path}: `isobit {command}` has no {flag}");
            }
            named += 1;
        }
    }
    assert!(named > 20, "only {named} are named");
}
