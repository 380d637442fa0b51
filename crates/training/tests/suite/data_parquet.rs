//! Parquet files as data: the rows, their tokens and their digest are those of the same rows in
//! JSONL, and a file that cannot be read says which row and column.

use isobit_training::data::{self, DataConfig, DataError, DataErrorKind, Report};
use isobit_training::row::Row;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn load(path: PathBuf) -> Result<(Vec<Row>, Report), DataError> {
    let folder = tempfile::tempdir().expect("a folder");
    for (from, to) in [("tokenizer.json", "tokenizer.json"), ("templates/chatml.jinja", "chat_template.jinja")] {
        std::fs::copy(fixtures().join(from), folder.path().join(to)).expect("a copy");
    }
    let config = r#"{"eos_token": "<|endoftext|>"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("a file");
    let config = DataConfig { files: vec![path], allow_untrainable_rows: true, ..DataConfig::default() };
    let (tokenizer, template) = data::open(folder.path(), &config.date)?;
    data::load(&config, &tokenizer, template.as_ref())
}

#[test]
fn parquet_and_jsonl_give_the_same_rows() {
    let file = |name: &str| fixtures().join("parquet").join(name);
    for (jsonl, parquet) in [
        ("messages.jsonl", "messages-zstd.parquet"),
        ("messages.jsonl", "messages-groups.parquet"),
        ("pairs.jsonl", "pairs-beside.parquet"),
        ("tokens.jsonl", "tokens-64.parquet"),
        ("values.jsonl", "values-split.parquet"),
    ] {
        let (rows, report) = load(file(jsonl)).expect(jsonl);
        let (found, found_report) = load(file(parquet)).expect(parquet);
        assert!(rows.len() > 1, "{jsonl}");
        assert_eq!(found.iter().map(Row::tokens).collect::<Vec<_>>(), rows.iter().map(Row::tokens).collect::<Vec<_>>());
        let counts =
            |report: &Report| (report.digest.clone(), report.tokens, report.trainable_tokens, report.dropped.clone());
        assert_eq!(counts(&found_report), counts(&report), "{parquet}");
    }
}

#[test]
fn an_error_names_file_row_and_column() {
    let file = |name: &str| fixtures().join("parquet").join(name);
    let error = load(file("refused-infinite.parquet")).expect_err("no JSON form");
    let text = error.to_string();
    assert!(text.contains("refused-infinite.parquet:1: column `text`: the number inf"), "{text}");
    let whole = load(file("refused-timestamps.parquet")).expect_err("timestamps");
    assert!(whole.to_string().contains("column `text` holds timestamps"), "{whole}");
    // A name that promises Parquet, and Parquet under another name.
    let folder = tempfile::tempdir().expect("a folder");
    let (named, unnamed) = (folder.path().join("a.parquet"), folder.path().join("blob"));
    std::fs::write(&named, "{\"text\":\"a\"}\n").expect("a file");
    let not = load(named).expect_err("JSON");
    assert!(not.to_string().contains("does not begin with `PAR1`"), "{not}");
    std::fs::copy(file("pairs-large.parquet"), &unnamed).expect("a copy");
    assert_eq!(load(unnamed).expect("rows").0.len(), 40);
    for error in [error, whole, not] {
        assert_eq!(error.kind(), DataErrorKind::Data);
        assert!(!error.hint().is_empty());
    }
}
