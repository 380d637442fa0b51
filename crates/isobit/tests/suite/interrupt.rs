//! Ctrl-C before training: there is nothing to save, and the program ends at once.
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
