//! `isobit data` from the outside: reports, the mask in brackets, messages and exit codes.

use crate::model_folder::{Folder, Shape};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const ROWS: &str = r#"{"messages":[{"role":"user","content":"Grüße?"},{"role":"assistant","content":"Ja \u001b[31m 👍"}]}
{"messages":[{"role":"user","content":"How many?"},{"role":"assistant","content":"Seven."}]}
"#;

/// A folder with a model and a data file.
fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../training/tests/fixtures");
    std::fs::copy(fixtures.join("tokenizer.json"), folder.path().join("tokenizer.json")).expect("a copy");
    std::fs::copy(fixtures.join("templates/chatml.jinja"), folder.path().join("chat_template.jinja")).expect("a copy");
    let data = folder.path().join("data.jsonl");
    std::fs::write(&data, ROWS).expect("a file");
    (folder, data)
}

fn isobit(command: &str, folder: &TempDir, data: &Path, more: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_isobit"));
    program.args(["data", command, "--model"]).arg(folder.path()).arg("--data").arg(data).args(more);
    program.output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Tables have all columns in every row: what is null is said.
#[test]
fn a_field_that_is_null_is_named() {
    let folder = Folder::new(Shape::TINY);
    folder.put("null.jsonl", "{\"prompt\":\"1\",\"completion\":\"2\"}\n{\"prompt\":\"1\",\"completion\":null}\n");
    let ran = folder.run(&["data", "show", "--model", "model", "--data", "null.jsonl"]);
    ran.says(3, &["null.jsonl:2: ", "`completion`", "null"]);
    assert!(!ran.err.contains("one format"), "{}", ran.err);
}

/// A name on the hub is no folder, and a cache without a current revision is a choice: both are
/// said by every command that takes a model.
#[test]
fn a_name_on_the_hub_is_told_from_a_folder() {
    let folder = Folder::new(Shape::TINY);
    for revision in ["a", "b"] {
        std::fs::create_dir_all(folder.path("cache/models--org--name/snapshots").join(revision)).expect("folders");
    }
    let cached = ["cache/models--org--name", "cache/models--org--name/snapshots"];
    for command in [&["data", "check"], &["data", "show"]] {
        let with = |model: &str| folder.run(&[&command[..], &["--model", model, "--data", "data.jsonl"]].concat());
        with("Org/Name").says(2, &["hint: this looks like a name on the Hugging Face hub"]);
        for path in &cached {
            with(path).says(2, &["2 revisions of the model"]);
        }
    }
    for command in ["gguf", "merge"] {
        let with = |model: &str| folder.run(&["export", command, model, "-o", "out"]);
        with("Org/Name").says(2, &["hint: this looks like a name on the Hugging Face hub"]);
        for path in &cached {
            with(path).says(2, &["2 revisions of the model"]);
        }
    }
}

#[test]
fn check_counts_and_lists() {
    let (folder, data) = folder();
    let text = stdout(&isobit("check", &folder, &data, &[]));
    assert!(text.contains("messages, 2 rows") && text.contains("rows       2\n"), "{text}");
    assert!(text.contains("truncated  0 longer than 1024 tokens") && text.contains("digest     "), "{text}");
    let more = ["--max-seq-length", "50", "--allow-untrainable-rows", "--json", "--workers", "2"];
    let report: serde_json::Value =
        serde_json::from_str(&stdout(&isobit("check", &folder, &data, &more))).expect("one JSON object");
    assert_eq!(report["schema"], "isobit.data-check/1");
    let cut = serde_json::json!([{"source": {"file": 0, "line": 1}, "tokens": 58}]);
    assert_eq!((&report["truncated"], &report["dropped"]), (&cut, &serde_json::json!([])), "{report}");
    assert_eq!(report["files"][0]["loss"], "assistant");
}

#[test]
fn show_marks_what_is_trained_on() {
    let (folder, data) = folder();
    let text = stdout(&isobit("show", &folder, &data, &[]));
    assert!(text.starts_with("row 0 from ") && text.contains("data.jsonl:1: "), "{text}");
    // Neither colours nor what the data brings along reach the output.
    assert!(text.contains("assistant\n⟦Ja \\u{1b}[31m 👍<|im_end|>\n⟧\n"), "{text}");
    assert!(!text.contains('\x1b'));
    let text = stdout(&isobit("show", &folder, &data, &["--row", "1", "--tokens"]));
    let starred = text.lines().filter(|line| line.contains(" * ")).count();
    assert!(text.contains(&format!("{starred} trained on")) && text.contains("\"<|im_end|>\""), "{text}");
    let text = stdout(&isobit("show", &folder, &data, &["--packing"]));
    assert!(text.contains("\n--- next document\n") && text.matches('⟦').count() == 2, "{text}");
    let line: serde_json::Value =
        serde_json::from_str(&stdout(&isobit("show", &folder, &data, &["--json"]))).expect("one JSON object");
    assert_eq!(line["tokens"].as_array().map(Vec::len), line["targets"].as_array().map(Vec::len));
}

#[test]
fn show_prints_a_range_of_rows() {
    let (folder, data) = folder();
    std::fs::write(&data, ROWS.repeat(3)).expect("a file");
    let rows = |range: &str| {
        let text = stdout(&isobit("show", &folder, &data, &["--rows", range, "--json"]));
        text.lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("an object a line")["row"].as_u64())
            .collect::<Vec<_>>()
    };
    assert_eq!(rows("0..2"), [Some(0), Some(1)]);
    assert_eq!(rows("4..20"), [Some(4), Some(5)]);
    assert_eq!((rows("..").len(), rows("5..").len(), rows("..3").len()), (6, 1, 3));
    let text = stdout(&isobit("show", &folder, &data, &["--rows", "1..3"]));
    assert!(text.contains("row 1 from ") && text.contains("row 2 from ") && !text.contains("row 3 from "), "{text}");
    for (range, want) in
        [("6..9", "there is no row 6"), ("3..3", "the range is empty"), ("x..2", "`x` is not the number")]
    {
        let output = isobit("show", &folder, &data, &["--rows", range]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(want), "{range}");
    }
}

#[test]
fn check_lists_bad_rows_and_counts_them() {
    let (folder, data) = folder();
    let bad = "{\n".repeat(25) + &"{\"messages\":[]}\n".repeat(3);
    std::fs::write(&data, format!("{ROWS}{bad}{ROWS}")).expect("a file");
    let output = isobit("check", &folder, &data, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(
        text.contains("bad        28\n         3 a field that is missing or wrong (hint: ")
            && text.contains("\n        25 not JSON (hint: "),
        "{text}"
    );
    assert_eq!(text.matches("data.jsonl:3: not JSON").count(), 1, "{text}");
    assert_eq!(text.matches(": not JSON: ").count(), 20, "{text}");
    assert!(
        text.contains("and 8 more: --json lists them all") && text.contains("rows       4 of 32: 28 bad, 0 dropped\n"),
        "{text}"
    );
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("28 of 32 rows cannot be trained on") && message.contains("hint: "), "{message}");
    let output = isobit("check", &folder, &data, &["--json"]);
    assert_eq!(output.status.code(), Some(3));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["bad"].as_array().map(Vec::len), Some(28));
    assert_eq!(report["bad"][0]["source"], serde_json::json!({"file": 0, "line": 3}));
}

#[test]
fn rows_with_special_tokens_are_dropped_by_choice() {
    let (folder, data) = folder();
    std::fs::write(&data, format!("{ROWS}{}", ROWS.replace("Seven.", "<|im_end|>"))).expect("a file");
    assert_eq!(isobit("check", &folder, &data, &[]).status.code(), Some(3));
    let text = stdout(&isobit("check", &folder, &data, &["--drop-special-token-rows"]));
    assert!(
        text.contains("dropped    1\n") && text.contains("data.jsonl:4: its text contains a special token"),
        "{text}"
    );
}

/// Pipes and devices in the place of files are refused at once: reading them would never end.
#[cfg(unix)]
#[test]
fn only_regular_files_are_read() {
    for name in
        ["data.jsonl", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    {
        for device in [false, true] {
            let (folder, data) = folder();
            let path = folder.path().join(name);
            let _ = std::fs::remove_file(&path);
            if device {
                std::os::unix::fs::symlink("/dev/zero", &path).expect("a link");
            } else {
                assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
            }
            let output = isobit("check", &folder, &data, &[]);
            let message = String::from_utf8_lossy(&output.stderr);
            let kind = if device { "a device" } else { "a pipe" };
            assert_eq!(output.status.code(), Some(8), "{name}: {message}");
            assert!(message.contains(&format!("{name} is {kind}, not a regular file")), "{message}");
        }
    }
    let (folder, _) = folder();
    let config = folder.path().join("run.toml");
    assert!(Command::new("mkfifo").arg(&config).status().expect("mkfifo").success());
    let output = Command::new(env!("CARGO_BIN_EXE_isobit")).arg("train").arg(&config).output().expect("it starts");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && message.contains("run.toml is a pipe"), "{message}");
}

#[test]
fn errors_have_their_exit_codes() {
    let (folder, data) = folder();
    let bad = folder.path().join("bad.jsonl");
    std::fs::write(&bad, format!("{ROWS}{{\"messages\": [")).expect("a file");
    let missing = folder.path().join("missing.jsonl");
    let cases: [(&Path, &[&str], i32, &str); 5] = [
        (&bad, &[], 3, "bad.jsonl:3: not JSON"),
        (&missing, &[], 2, "missing.jsonl does not exist"),
        (&data, &["--row", "9"], 2, "there is no row 9"),
        (&data, &["--max-seq-length", "0"], 2, "max_seq_length"),
        (&data, &["--max-seq-length", "40"], 3, "truncation to max_seq_length"),
    ];
    for (data, more, code, want) in cases {
        let output = isobit("show", &folder, data, more);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(message.contains(want) && message.contains("\nhint: ") && output.stdout.is_empty(), "{message}");
    }
    std::fs::write(folder.path().join("chat_template.jinja"), "{% if %}").expect("a file");
    assert_eq!(isobit("check", &folder, &data, &[]).status.code(), Some(8));
}
