//! Hostile tokenizer files: what the tokenizer library panics on, or would take all memory for,
//! ends in one clear error.
#![cfg(unix)]

use crate::model_folder::{Folder, Ran, Shape, finished};
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// `data check` with a tokenizer that has one part changed, under 2 GiB of address space.
fn check(part: &str, value: Value) -> Ran {
    let folder = Folder::new(Shape::TINY);
    let text = std::fs::read_to_string(folder.path("model/tokenizer.json")).expect("a tokenizer");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    tokenizer[part] = value;
    folder.put("model/tokenizer.json", tokenizer.to_string());
    folder.put("data.jsonl", "{\"text\":\"1 2 3\"}\n");
    let script = "ulimit -v 2097152 && exec \"$0\" data check --model model --data data.jsonl";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_isobit")]).current_dir(folder.path("")).stdin(Stdio::null());
    finished(command.output().expect("a shell starts"))
}

#[test]
fn caught_panics_print_nothing_but_the_error() {
    for (part, value, code, says) in [
        // A table that claims 4 GiB, and one that points outside of itself.
        (
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
            8,
            "a table that is cut off",
        ),
        (
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAGFiY2Q="}),
            3,
            "it panics on this text",
        ),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), 3, "it panics on this text"),
    ] {
        let ran = check(part, value);
        assert_eq!(ran.code, code, "{part}: {}", ran.err);
        // What is wrong with a row stands in the report.
        let said = format!("{}{}", ran.out, ran.err);
        assert!(said.contains(says) && ran.err.starts_with("error: "), "{part}: {said}");
        assert!(!said.contains("panicked") && !said.contains("RUST_BACKTRACE"), "{part}: {said}");
    }
}

#[test]
fn replacements_that_multiply_are_refused() {
    let replace =
        |content: usize| json!({"type": "Replace", "pattern": {"String": "1"}, "content": "1".repeat(content)});
    let chain =
        |count: usize, content: usize| json!({"type": "Sequence", "normalizers": vec![replace(content); count]});
    let ran = check("normalizer", chain(6, 1200));
    assert_eq!(ran.code, 8, "{}", ran.err);
    assert!(ran.err.contains("the normalizer can make text more than 4096 times as long"), "{}", ran.err);
    // Nested ones count as well.
    let nested = json!({"type": "Sequence", "normalizers": [chain(3, 40), chain(3, 40)]});
    assert_eq!(check("normalizer", nested).code, 8);
    assert_eq!(check("normalizer", chain(2, 3)).code, 0);
}
