//! A reader that closes its end: every command ends quietly with 141, as tools do that the signal
//! ends; training goes on.
#![cfg(unix)]

use crate::model_folder::{Folder, Ran, Shape, finished};
use std::io::PipeWriter;
use std::process::Stdio;

/// A pipe whose reader is gone.
fn closed() -> PipeWriter {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer
}

/// `both`: standard error goes the same way, as with `2>&1 | head`.
fn into_closed(folder: &Folder, arguments: &[&str], both: bool) -> Ran {
    let stderr = if both { Stdio::from(closed()) } else { Stdio::piped() };
    let child = folder.command(arguments).stdout(closed()).stderr(stderr).spawn().expect("the program starts");
    finished(child.wait_with_output().expect("the program ends"))
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &["max_steps=1"]);
    folder.trained("second", &["max_steps=1", "seed=8"]);
    let model = ["--model", "model"];
    let data = ["--data", "data.jsonl"];
    for arguments in [
        vec!["diff", "first", "second"],
        vec!["diff", "first", "second", "--json"],
        vec!["diff", "first", "first"],
        vec!["plan", "config.toml", "--explain"],
        vec!["plan", "config.toml", "--json"],
        vec!["--help"],
        vec!["--version"],
        vec!["bench", "step", "--help"],
        vec!["devices"],
        vec!["models"],
        vec!["man"],
        vec!["completions", "bash"],
        vec!["bench", "kernels", "--op", "add", "--shape", "4x4", "--runs", "1"],
        vec!["bench", "step", "--config", "config.toml", "--steps", "1"],
        [&["data", "check"], &model[..], &data].concat(),
        [&["data", "show"], &model[..], &data].concat(),
        [&["eval", "-q"], &model[..], &data].concat(),
        [&["generate", "-q", "--prompt", "1+1=", "--max-tokens", "2"], &model[..]].concat(),
    ] {
        for both in [false, true] {
            let ran = into_closed(&folder, &arguments, both);
            assert_eq!((ran.code, ran.err.as_str()), (141, ""), "{arguments:?}");
        }
    }
}

#[test]
fn errors_keep_their_code_when_nobody_reads_them() {
    let folder = Folder::new(Shape::TINY);
    for (arguments, code) in [
        (&["diff", "nowhere", "nowhere"][..], 2),
        (&["diff", "nowhere", "nowhere", "--json"], 2),
        (&["diff", "nowhere"], 2),
        (&["plan", "config.toml", "--set", "threads=many"], 2),
        (&["train", "config.toml", "--set", "datasets.0.path=config.toml"], 3),
    ] {
        assert_eq!(into_closed(&folder, arguments, true).code, code, "{arguments:?}");
    }
}

#[test]
fn training_goes_on_without_a_reader() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("read", &[]);
    let arguments = ["train", "config.toml", "--json", "--set", "output_dir=unread"];
    assert_eq!(into_closed(&folder, &arguments, true).code, 0);
    folder.same("read", "unread");
}
