//! What the commands print, word for word: `tests/snapshots/*.trycmd` hold every command's help,
//! its main output and the errors people make. `[..]` stands for what differs between machines or
//! runs.
//!
//! `TRYCMD=overwrite cargo test --release -p isobit snapshots` writes what is printed now; look at
//! the diff.

use crate::model_folder::{Folder, Shape, config_json, weights};
use isobit_conformance::in_own_process;
use std::path::Path;
use std::process::Command;

/// Where the snapshots are.
fn snapshots() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/snapshots"))
}

const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// What the commands are given: a model and others that are wrong in some way, data, a config, two
/// runs.
fn folder() -> Folder {
    let folder = Folder::new(Shape::TINY);
    folder.put_model("talking", &config_json(folder.shape), &weights(folder.shape, 1));
    folder.put("talking/chat_template.jinja", TEMPLATE);
    folder.put_model("damaged", &config_json(folder.shape), &weights(folder.shape, 1));
    folder.put("damaged/model.safetensors", "no tensors");
    let wide = Shape { hidden: 64, ..folder.shape };
    folder.put_model("wide", &config_json(wide), &weights(wide, 1));
    folder.put("bad.jsonl", "{\"prompt\":\"1+1=\",\"completion\":\"2\"}\n{\"prompt\":\"1+2=\"}\n");
    folder.trained("first", &["max_steps=1"]);
    folder.trained("second", &["max_steps=1", "seed=8"]);
    folder.trained("other", &["max_steps=1", "base_model=wide"]);
    folder
}

/// Files that a test of their own runs.
const ELSEWHERE: [&str; 1] = ["demo"];

/// Runs these snapshots in the current folder. `trycmd=plan` behind the name of a test chooses one
/// file.
pub(crate) fn check(names: &[String]) {
    let cases = trycmd::TestCases::new();
    cases.register_bin("isobit", Path::new(env!("CARGO_BIN_EXE_isobit"))).env("COLUMNS", "100");
    cases.insert_var("[VERSION]", env!("CARGO_PKG_VERSION")).expect("a name in brackets");
    for name in names {
        cases.case(snapshots().join(name).with_extension("trycmd"));
    }
    cases.run();
}

/// Names of all snapshots.
fn names() -> Vec<String> {
    let files = std::fs::read_dir(snapshots()).expect("a folder").map(|entry| entry.expect("an entry").path());
    files.filter_map(|path| Some(path.file_stem()?.to_str()?.to_string())).collect()
}

/// Commands run in the current folder, which is one for the process.
#[test]
fn commands_print_what_they_printed() {
    let test = concat!(module_path!(), "::commands_print_what_they_printed");
    let mut held = None;
    let prepare = |command: &mut Command| {
        let chosen = std::env::args().filter(|argument| argument.starts_with("trycmd="));
        command.current_dir(held.insert(folder()).path("")).args(chosen);
    };
    let names: Vec<String> = names().into_iter().filter(|name| !ELSEWHERE.contains(&name.as_str())).collect();
    in_own_process(test, prepare, || check(&names));
}

/// A new command brings its snapshot.
#[test]
fn every_command_has_a_snapshot() {
    let help = Folder::new(Shape::TINY).run(&["--help"]).out;
    let listed = help.split("Commands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("a list");
    let commands: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.len() >= 13, "{help}");
    for command in commands {
        let path = snapshots().join(format!("{command}.trycmd"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(text.contains(&format!("$ isobit {command} --help\n")), "{command} --help in {}", path.display());
    }
}
