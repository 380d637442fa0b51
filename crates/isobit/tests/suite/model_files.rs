//! Files of models and adapters that are no files: pipes and devices end at once, with the exit
//! code of a malformed file.
#![cfg(unix)]

use crate::model_folder::{Folder, Ran, Shape, finished};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The program with little memory and little time: without care it would wait for a writer, or read
/// until memory ends.
#[track_caller]
fn soon(folder: &Folder, arguments: &[&str]) -> Ran {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 4194304; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_isobit")]);
    command.args(arguments).current_dir(folder.path("")).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    for _ in 0..2000 {
        if child.try_wait().expect("a child").is_some() {
            return finished(child.wait_with_output().expect("its output"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().expect("killed");
    panic!("{arguments:?} does not end");
}

/// Puts a pipe or an endless device in the place of a file, and what messages call it.
fn replace(folder: &Folder, name: &str, pipe: bool) -> &'static str {
    let path = folder.path(name);
    if path.exists() {
        std::fs::remove_file(&path).expect("removed");
    }
    if pipe {
        assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
        "is a pipe, not a regular file"
    } else {
        std::os::unix::fs::symlink("/dev/zero", &path).expect("linked");
        "is a device, not a regular file"
    }
}

#[test]
fn files_of_a_model() {
    let train = ["train", "config.toml"];
    let plan = ["plan", "config.toml"];
    let eval = ["eval", "--model", "model", "--data", "data.jsonl"];
    for name in ["config.json", "quantize_config.json", "model.safetensors", "model.safetensors.index.json"] {
        for pipe in [true, false] {
            let folder = Folder::new(Shape::TINY);
            if name.ends_with("index.json") {
                std::fs::remove_file(folder.path("model/model.safetensors")).expect("removed");
            }
            let what = replace(&folder, &format!("model/{name}"), pipe);
            for arguments in [&train[..], &plan, &eval] {
                soon(&folder, arguments).says(8, &[name, what, "hint: "]);
            }
        }
    }
    let folder = Folder::new(Shape::TINY);
    let index = r#"{"weight_map":{"model.norm.weight":"part.safetensors"}}"#;
    std::fs::remove_file(folder.path("model/model.safetensors")).expect("removed");
    folder.put("model/model.safetensors.index.json", index);
    let what = replace(&folder, "model/part.safetensors", true);
    soon(&folder, &train).says(8, &["part.safetensors", what]);
}

#[test]
fn files_of_an_adapter() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=1"]);
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        for pipe in [true, false] {
            std::fs::create_dir_all(folder.path("adapter")).expect("folder");
            for file in ["adapter_config.json", "adapter_model.safetensors"] {
                let _ = std::fs::remove_file(folder.path(&format!("adapter/{file}")));
                let from = folder.path(&format!("run/final/{file}"));
                std::fs::copy(from, folder.path(&format!("adapter/{file}"))).expect("copied");
            }
            let what = replace(&folder, &format!("adapter/{name}"), pipe);
            for command in [
                &["eval", "--model", "model", "--data", "data.jsonl"][..],
                &["generate", "--model", "model", "--prompt", "1+1="],
            ] {
                soon(&folder, &[command, &["--adapter", "adapter"]].concat()).says(8, &[name, what]);
            }
        }
    }
}

/// A config of more bytes than any has: read no further than its limit.
#[test]
fn files_that_are_too_large() {
    let folder = Folder::new(Shape::TINY);
    let file = std::fs::File::create(folder.path("model/config.json")).expect("created");
    file.set_len(1 << 40).expect("a sparse file");
    soon(&folder, &["train", "config.toml"]).says(8, &["config.json", "1099511627776 bytes", "the limit is"]);
}
