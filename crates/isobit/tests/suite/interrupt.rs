//! Ctrl-C before training: there is nothing to save, and the program ends at once. A signal during
//! an export: what was written is removed.
#![cfg(unix)]

use crate::model_folder::{self, Folder, Shape};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

#[test]
fn a_signal_while_data_are_tokenised_ends_the_program() {
    let folder = Folder::new(Shape::TINY);
    // Far more rows than can be read in the time, and a bad one at the end: who does not hear the
    // signal ends with 3.
    folder.put("data.jsonl", model_folder::rows(1_500_000) + "{");
    let mut child = folder.training("out", &[]);
    std::thread::sleep(Duration::from_millis(500));
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
    let status = child.wait().expect("it ends");
    assert_eq!(status.signal(), Some(2), "{status}");
    assert!(!folder.has("out"));
}

/// A table so large that writing it takes a while.
const LARGE: Shape = Shape { hidden: 32, intermediate: 48, vocabulary: 500_000, rows: 40 };

#[test]
fn a_signal_during_an_export_leaves_nothing() {
    let folder = Folder::new(LARGE);
    let before = model_folder::names(&folder.path(""));
    for (signal, code) in [("-TERM", 143), ("-INT", 130)] {
        let mut command = folder.command(&["export", "gguf", "model", "--type", "q4_0", "-o", "model.gguf"]);
        let mut child = command.stderr(std::process::Stdio::null()).spawn().expect("it starts");
        let is_writing = || std::fs::read_dir(folder.path("")).expect("a folder").count() > before.len();
        while !is_writing() && child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill").success());
        assert_eq!(child.wait().expect("it ends").code(), Some(code), "{signal}");
        assert_eq!(model_folder::names(&folder.path("")), before, "{signal}");
    }
}
