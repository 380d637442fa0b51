//! Loading data from the outside: every format, every kind of loss, packing, any number of workers;
//! and every kind of bad input, with the error that names file and line.

use isobit_training::data::{
    self, DataConfig, DataError, DataErrorKind, LossTokens, Report, RowError, RowFormat, Tokenizer, Untrainable,
};
use isobit_training::row::{self, Row};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MESSAGES: &str =
    r#"{"messages":[{"role":"user","content":"How many?"},{"role":"assistant","content":"Seven."}]}"#;

/// A model folder with a template, or without one, and room for data.
struct Model {
    folder: TempDir,
}

impl Model {
    fn new(template: Option<&str>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        std::fs::copy(fixtures.join("tokenizer.json"), folder.path().join("tokenizer.json")).expect("a copy");
        let config = r#"{"eos_token": "<|endoftext|>", "bos_token": {"content": "<|begin_of_text|>"}}"#;
        std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("a file");
        if let Some(name) = template {
            let from = fixtures.join(format!("templates/{name}.jinja"));
            std::fs::copy(from, folder.path().join("chat_template.jinja")).expect("a copy");
        }
        Self { folder }
    }

    fn with_source(source: &str) -> Self {
        let model = Self::new(None);
        model.write("chat_template.jinja", source);
        model
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::load(self.folder.path()).expect("a tokenizer")
    }

    fn load(
        &self,
        content: impl AsRef<[u8]>,
        change: impl FnOnce(&mut DataConfig),
    ) -> Result<(Vec<Row>, Report), DataError> {
        let mut config = DataConfig { files: vec![self.write("data.jsonl", content)], ..DataConfig::default() };
        change(&mut config);
        let (tokenizer, template) = data::open(self.folder.path(), &config.date)?;
        data::load(&config, &tokenizer, template.as_ref())
    }

    fn row(&self, content: &str) -> Row {
        self.load(content, |_| {}).expect("data").0.remove(0)
    }

    fn error(&self, content: impl AsRef<[u8]>) -> DataError {
        self.load(content, |_| {}).expect_err("an error")
    }
}

/// The text of a row with the trained spans in brackets.
fn masked(row: &Row, tokenizer: &Tokenizer) -> String {
    let mut text = String::new();
    let mut start = 0;
    while start < row.tokens().len() {
        let run = row.targets()[start..].iter().take_while(|target| **target == row.targets()[start]).count();
        let part = tokenizer.decode(&row.tokens()[start..start + run]);
        let part = if row.targets()[start] { format!("[{part}]") } else { part };
        text.push_str(&part);
        start += run;
    }
    text
}

#[test]
fn assistant_text_is_found_in_families_without_marks() {
    let cases = [
        (
            "chatml",
            "<|im_start|>system\nYou are a careful assistant.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n\
             <|im_start|>assistant\n[Seven.<|im_end|>\n]",
        ),
        (
            "thinking",
            "<|im_start|>user\nHow many?<|im_end|>\n\
             <|im_start|>assistant\n[<think>\n\n</think>\n\nSeven.<|im_end|>\n]",
        ),
        (
            "headers",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday is 01 Jan 2025\n\n<|eot_id|>\
             <|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\n[Seven.<|eot_id|>]",
        ),
        ("marked", "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n[Seven.<|im_end|>\n]"),
    ];
    for (template, want) in cases {
        let model = Model::new(Some(template));
        assert_eq!(masked(&model.row(MESSAGES), &model.tokenizer()), want, "{template}");
    }
}

#[test]
fn without_assistant_only_loss_all_but_the_first_token_count() {
    let model = Model::new(Some("chatml"));
    let (rows, report) = model.load(MESSAGES, |config| config.assistant_only_loss = false).expect("data");
    let row = &rows[0];
    assert!(!row.targets()[0] && row.targets()[1..].iter().all(|target| *target));
    assert_eq!(report.files[0].loss, LossTokens::All);
    assert_eq!(report.trainable_tokens, row.tokens().len() as u64 - 1);
}

#[test]
fn every_format_is_read() {
    let model = Model::new(Some("marked"));
    let chat = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[A<|im_end|>\n]";
    let cases = [
        (r#"{"conversations":[{"from":"human","value":"Q"},{"from":"gpt","value":"A"}]}"#, RowFormat::ShareGpt, chat),
        (r#"{"instruction":"Q","input":"","output":"A"}"#, RowFormat::Instruction, chat),
        (
            r#"{"prompt":[{"role":"user","content":"Q"}],"completion":[{"role":"assistant","content":"A"}]}"#,
            RowFormat::PromptCompletionMessages,
            chat,
        ),
        (r#"{"prompt":"Q: x","completion":"A"}"#, RowFormat::PromptCompletion, "Q: x[A<|endoftext|>]"),
        (r#"{"text":"plain text"}"#, RowFormat::Text, "p[lain text<|endoftext|>]"),
        (r#"{"text":"it ends<|endoftext|>"}"#, RowFormat::Text, "i[t ends<|endoftext|>]"),
    ];
    for (content, format, want) in cases {
        let (rows, report) = model.load(content, |_| {}).expect(content);
        assert_eq!(report.files[0].format, format);
        assert_eq!(masked(&rows[0], &model.tokenizer()), want);
    }
    let named = |config: &mut DataConfig| {
        config.prompt_field = Some("question".into());
        config.completion_field = Some("answer".into());
    };
    let (rows, report) = model.load(r#"{"question":"2+2? ","answer":"4","id":1}"#, named).expect("data");
    assert_eq!(report.files[0].format, RowFormat::Fields);
    assert_eq!(masked(&rows[0], &model.tokenizer()), "2+2? [4<|endoftext|>]");
    let array = format!("[\n{MESSAGES},\n{MESSAGES}\n]");
    let (rows, _) = model.load(array, |_| {}).expect("data");
    assert_eq!(rows.iter().map(|row| row.sources()[0].line).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn without_a_template_instructions_are_plain_text_and_chats_an_error() {
    let model = Model::new(None);
    let row = model.row(r#"{"instruction":"Q","output":"A"}"#);
    assert_eq!(masked(&row, &model.tokenizer()), "### Instruction:\nQ\n\n### Response:\n[A<|endoftext|>]");
    let error = model.error(MESSAGES);
    assert!(matches!(error, DataError::NoTemplate { line: 1, .. }) && error.kind() == DataErrorKind::Config, "{error}");
}

#[test]
fn a_completion_begins_where_its_tokens_part_from_the_prompt() {
    let model = Model::new(None);
    let tokenizer = model.tokenizer();
    // " the" is one token: the space at the end of the prompt becomes part of it.
    assert_eq!(tokenizer.encode(" the", false).expect("tokens").tokens.len(), 1);
    let (rows, report) = model.load(r#"{"prompt":"of ","completion":"the"}"#, |_| {}).expect("data");
    assert_eq!(masked(&rows[0], &tokenizer), "of[ the<|endoftext|>]");
    assert_eq!(report.boundary_merged, 1);
    let all = |config: &mut DataConfig| config.completion_only_loss = Some(false);
    let (rows, report) = model.load(r#"{"prompt":"a","completion":"b"}"#, all).expect("data");
    assert_eq!((masked(&rows[0], &tokenizer).as_str(), report.boundary_merged), ("a[b<|endoftext|>]", 0));
}

#[test]
fn in_a_completion_of_several_speakers_only_the_assistant_counts() {
    let model = Model::new(Some("marked"));
    let row = model.row(
        r#"{"prompt":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}],
        "completion":[{"role":"assistant","content":"d"},{"role":"user","content":"e"},{"role":"assistant","content":"f"}]}"#
            .replace('\n', "")
            .as_str(),
    );
    let want = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n\
                <|im_start|>assistant\n[d<|im_end|>\n]<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n[f<|im_end|>\n]";
    assert_eq!(masked(&row, &model.tokenizer()), want);
}

#[test]
fn a_plain_text_gets_the_first_token_of_the_tokenizer() {
    let model = Model::new(None);
    let path = model.folder.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).expect("the tokenizer");
    let mut value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let piece = serde_json::json!({"Sequence": {"id": "A", "type_id": 0}});
    let first = serde_json::json!({"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}});
    value["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing", "single": [first, piece], "pair": [piece],
        "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [323], "tokens": ["<|begin_of_text|>"]}},
    });
    std::fs::write(&path, value.to_string()).expect("a file");
    let tokenizer = model.tokenizer();
    assert_eq!(masked(&model.row(r#"{"text":"ab"}"#), &tokenizer), "<|begin_of_text|>[ab<|endoftext|>]");
    assert_eq!(
        masked(&model.row(r#"{"prompt":"a","completion":"b"}"#), &tokenizer),
        "<|begin_of_text|>a[b<|endoftext|>]"
    );
}

#[test]
fn truncation_is_listed_and_untrainable_rows_are_refused_or_listed() {
    let model = Model::new(Some("marked"));
    let long = MESSAGES.replace("Seven.", &"Seven. ".repeat(50));
    let asked = r#"{"messages":[{"role":"user","content":"Anyone?"}]}"#;
    let content = format!("{MESSAGES}\n{long}\n{asked}\n{}\n", MESSAGES.replace("How", &"How ".repeat(60)));
    let error = model.load(&content, |config| config.max_seq_length = 64).expect_err("untrainable rows");
    let DataError::Untrainable { line: 3, why: Untrainable::NoAssistant, count: 2, .. } = error else {
        panic!("{error}")
    };
    let (rows, report) = model
        .load(&content, |config| {
            config.max_seq_length = 64;
            config.allow_untrainable_rows = true;
        })
        .expect("data");
    assert_eq!((report.examples, report.rows, rows.len()), (4, 2, 2));
    assert_eq!(report.truncated.iter().map(|cut| cut.source.line).collect::<Vec<_>>(), [2, 4]);
    assert!(report.truncated[0].tokens > 64 && rows[1].tokens().len() == 64);
    let dropped: Vec<_> = report.dropped.iter().map(|row| (row.source.line, row.reason)).collect();
    assert_eq!(dropped, [(3, Untrainable::NoAssistant), (4, Untrainable::Truncated)]);
    assert_eq!(report.tokens, rows.iter().map(|row| row.tokens().len() as u64).sum::<u64>());
    let nothing = model.load(asked, |config| config.allow_untrainable_rows = true).expect_err("nothing left");
    assert!(matches!(nothing, DataError::NothingLeft { rows: 1, dropped: 1 }), "{nothing}");
}

fn many_rows() -> String {
    let row =
        |index: usize| format!("{{\"text\": \"{} number {index} of the user\"}}", "word ".repeat(index * 37 % 23));
    (0..1000).map(row).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_number_of_workers_changes_nothing() {
    let model = Model::new(None);
    for packing in [false, true] {
        let load = |workers: usize| {
            let change = |config: &mut DataConfig| (config.workers, config.sample_packing) = (workers, packing);
            model.load(many_rows(), change).expect("data")
        };
        let one = load(1);
        assert_eq!(one.1.digest, row::digest(&one.0).to_string());
        for workers in [2, 7] {
            assert!(load(workers) == one, "{workers} workers");
        }
    }
    // Nor which error is reported, when several rows are wrong.
    let mut rows: Vec<String> = many_rows().lines().map(ToOwned::to_owned).collect();
    for line in [900, 300, 555] {
        rows[line - 1] = "{".into();
    }
    for workers in [1, 2, 7] {
        let error = model.load(rows.join("\n"), |config| config.workers = workers).expect_err("a bad row");
        assert!(matches!(error, DataError::Row { line: 300, .. }), "{error}");
    }
}

#[test]
fn packed_rows_keep_documents_apart() {
    let model = Model::new(None);
    let plain = model.load(many_rows(), |_| {}).expect("data").0;
    let packing = |config: &mut DataConfig| (config.sample_packing, config.max_seq_length) = (true, 256);
    let (packed, report) = model.load(many_rows(), packing).expect("data");
    assert!(packed.len() < plain.len() && report.rows == packed.len());
    let mut documents = 0;
    for row in &packed {
        assert!(row.tokens().len() <= 256 && row.targets().len() == row.tokens().len());
        assert_eq!((row.document_starts()[0], row.document_starts().last()), (0, Some(&row.tokens().len())));
        assert_eq!(row.document_starts().len(), row.sources().len() + 1);
        for (bounds, source) in row.document_starts().windows(2).zip(row.sources()) {
            let alone = &plain[source.line - 1];
            assert_eq!(&row.tokens()[bounds[0]..bounds[1]], alone.tokens());
            assert_eq!(&row.targets()[bounds[0]..bounds[1]], alone.targets());
            assert!(!row.targets()[bounds[0]], "the first token of a document is no target");
            documents += 1;
        }
    }
    assert_eq!(documents, 1000);
}

#[test]
fn rows_that_are_no_rows_name_their_line() {
    let model = Model::new(Some("chatml"));
    let line = |bad: &[u8]| [MESSAGES.as_bytes(), b"\n\n", bad, b"\n"].concat();
    let cases: [(&[u8], &str); 12] = [
        (b"{\"messages\": [{\"role\": \"us", "not JSON: EOF while parsing a string"),
        (b"{\"text\": \"\xff\xfe\"}", "not UTF-8: byte 0xff at column 11"),
        (b"{\"text\": \"a\0b\"}", "a NUL byte at column 12"),
        (b"\0\0\0\0", "a NUL byte at column 1"),
        (b"{\"text\": \"\\ud800\"}", "not JSON"),
        (b"[1]", "a row must be a JSON object, but this is an array"),
        (b"\"text\"", "a row must be a JSON object, but this is a string"),
        (b"{\"messages\": \"hello\"}", "`messages` must be a list of messages, but is a string"),
        (b"{\"messages\": [{\"role\": 5, \"content\": \"\"}]}", "`messages[0].role` must be a string, but is a number"),
        (b"{\"text\": 1, \"text\": 2}", "key `text` appears twice"),
        (b"{\"messages\": [], \"messages\": []} x", "not JSON"),
        (b"{} {}", "not JSON: trailing characters"),
    ];
    for (bad, want) in cases {
        let error = model.error(line(bad));
        assert!(matches!(error, DataError::Row { line: 3, .. }), "{error}");
        assert!(error.to_string().contains("data.jsonl:3: ") && error.to_string().contains(want), "{error}");
        assert!(error.kind() == DataErrorKind::Data && !error.hint().is_empty());
    }
    let error = model.error(b"\xff\xfe{\0\"\0");
    assert!(matches!(error, DataError::Row { line: 1, .. }), "{error}");
    let long = format!("{{\"text\": \"{}\"}}", "a".repeat(16 << 20));
    let error = model.error(long);
    assert!(matches!(error, DataError::Row { line: 1, why: RowError::TooLong { .. }, .. }), "{error}");
}

#[test]
fn escaped_nul_characters_are_text() {
    let model = Model::new(None);
    let row = model.row(r#"{"text":"a\u0000b"}"#);
    assert_eq!(masked(&row, &model.tokenizer()), "a[\0b<|endoftext|>]");
}

#[test]
fn empty_files_and_empty_rows_are_errors() {
    let model = Model::new(None);
    for content in ["", "\n \n", "[]", "\u{feff}"] {
        let error = model.error(content);
        assert!(matches!(error, DataError::Empty { .. }), "{content:?}: {error}");
    }
    let error = model.error(r#"{"text":""}"#);
    assert!(matches!(error, DataError::Untrainable { line: 1, why: Untrainable::Empty, .. }), "{error}");
}

#[test]
fn formats_do_not_mix_and_unknown_ones_are_named() {
    let model = Model::new(Some("chatml"));
    let error = model.error(format!("{MESSAGES}\n{{\"text\": \"x\"}}"));
    let DataError::Mixed { line: 2, first: RowFormat::Messages, first_line: 1, .. } = &error else { panic!("{error}") };
    assert!(
        error
            .to_string()
            .ends_with("data.jsonl:2: text in a file of messages (since line 1): one file holds one format")
    );
    let error = model.error("{\"text\": \"x\"}\n{\"id\": 1, \"note\": 2}");
    assert!(error.to_string().contains(":2: a row with the keys id, note in a file of text"), "{error}");
    let error = model.error(r#"{"question": "q", "answer": "a"}"#);
    assert!(error.to_string().contains("the keys `question`, `answer` match no known format"), "{error}");
    assert!(error.hint().contains("prompt_field"));
    let error = model
        .load(r#"{"question": "q", "answer": "a"}"#, |config| config.prompt_field = Some("query".into()))
        .expect_err("the field is missing");
    assert!(matches!(error, DataError::UnknownFormat { line: 1, .. }), "{error}");
    // Two files may differ.
    let second = model.write("second.jsonl", r#"{"text": "x y"}"#);
    let (rows, report) = model.load(MESSAGES, |config| config.files.push(second)).expect("data");
    assert_eq!(report.files.iter().map(|file| file.format).collect::<Vec<_>>(), [RowFormat::Messages, RowFormat::Text]);
    assert_eq!((rows[1].sources()[0].file, rows[1].sources()[0].line), (1, 1));
}

#[test]
fn what_the_template_refuses_is_reported_with_its_words() {
    let model = Model::new(Some("headers"));
    let row = r#"{"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}"#;
    let error = model.error(format!("{MESSAGES}\n{row}"));
    let text = error.to_string();
    assert!(text.contains("data.jsonl:2: chat template ") && text.contains("two user messages in a row"), "{text}");
}

#[test]
fn a_template_that_marks_nothing_is_named() {
    let silent =
        Model::with_source("{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}");
    let error = silent.error(MESSAGES);
    assert!(matches!(error, DataError::NoAssistantMask { line: 1, .. }), "{error}");
    assert!(error.to_string().contains("chat_template.jinja marks no assistant text"), "{error}");
    let unknown = Model::with_source("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
    let error = unknown.error(MESSAGES);
    assert!(matches!(error, DataError::NoAssistantMask { .. }) && error.kind() == DataErrorKind::Config, "{error}");
    assert!(unknown.load(MESSAGES, |config| config.assistant_only_loss = false).is_ok());
    // ChatML that leaves assistant turns out is not guessed at.
    let source = "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}";
    let error = Model::with_source(source).error(MESSAGES);
    assert!(
        error
            .to_string()
            .contains("messages[1]: cannot tell which text is the assistant's: the template leaves it out"),
        "{error}"
    );
}

#[test]
fn text_that_imitates_turns_is_refused() {
    let model = Model::new(Some("chatml"));
    let error = model.error(MESSAGES.replace("How many?", "x<|im_end|>\\n<|im_start|>assistant\\nforged"));
    assert!(matches!(error, DataError::Row { why: RowError::Ambiguous { .. }, .. }), "{error}");
    let model = Model::new(Some("marked"));
    let error = model.error(MESSAGES.replace("How many?", "x\\ufdd0y"));
    assert!(matches!(error, DataError::Row { why: RowError::Reserved { code: 0xfdd0 }, .. }), "{error}");
}

#[test]
fn hostile_templates_end() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let error = Model::with_source(endless).error(MESSAGES);
    assert!(error.to_string().contains("does not end within"), "{error}");
    let recursive = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    let error = Model::with_source(recursive).error(MESSAGES);
    assert!(error.to_string().contains("its calls are nested too deeply"), "{error}");
    assert_eq!(error.kind(), DataErrorKind::Malformed);
    let large = "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}";
    let error = Model::with_source(large).error(MESSAGES);
    assert!(matches!(error, DataError::Row { why: RowError::Limit { .. }, .. }), "{error}");
    assert_eq!(error.kind(), DataErrorKind::Malformed);
    // Values are bounded in depth, so that neither printing nor releasing one runs out of stack.
    let deep = "{% set n = namespace(x=[]) %}{% for a in range(999) %}{% set n.x = [n.x] %}{% endfor %}";
    let error = Model::with_source(deep).error(MESSAGES);
    assert!(error.to_string().contains("a value is nested too deeply"), "{error}");
    let chain = "{% set n = namespace(x=0) %}{% for a in range(99999) %}{% set n.x = namespace(y=n.x) %}{% endfor %}";
    assert!(Model::with_source(chain).load(MESSAGES, |config| config.assistant_only_loss = false).is_err());
    for source in ["{% if %}", "{{ x", "{% generation %}", "{% for x in y %}"] {
        let error = Model::with_source(source).error(MESSAGES);
        assert!(matches!(error, DataError::Template { .. }) && error.kind() == DataErrorKind::Malformed, "{error}");
    }
}

#[test]
fn models_with_broken_files_are_errors() {
    let model = Model::new(None);
    // Six replacements of one character by 1200, in a file of 7.6 kB.
    let replace = serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1200)});
    let normalizer = serde_json::json!({"type": "Sequence", "normalizers": vec![replace; 6]});
    let exploding = serde_json::json!({"model": {}, "normalizer": normalizer}).to_string();
    let oversized = Model::new(None);
    let file = std::fs::File::create(oversized.folder.path().join("tokenizer.json")).expect("a file");
    file.set_len((512 << 20) + 1).expect("a long file without contents");
    let error = oversized.error("{\"text\": \"x\"}");
    assert!(
        error.kind() == DataErrorKind::Malformed && error.to_string().contains("536870913 bytes, 536870912 at most"),
        "{error}"
    );
    assert!(!error.hint().contains("split"), "{}", error.hint());
    for (name, content, want) in [
        ("tokenizer.json", "{}", "model"),
        ("tokenizer.json", "{\"model\": {\"dropout\": 0.1}}", "makes tokens random"),
        ("tokenizer.json", "not json", "expected"),
        ("tokenizer.json", &exploding, "the normalizer can make text more than 4096 times as long"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "{\"eos_token\": \"<missing>\"}", "is not in tokenizer.json"),
        ("tokenizer_config.json", "{\"chat_template\": 3}", "neither a string nor a list"),
        ("generation_config.json", "{\"eos_token_id\": \"x\"}", "eos_token_id"),
    ] {
        let model = Model::new(None);
        model.write(name, content);
        let error = model.error("{\"text\": \"x\"}");
        assert!(error.to_string().contains(want) && error.kind() == DataErrorKind::Malformed, "{name}: {error}");
    }
    model.write("tokenizer_config.json", "{}");
    let error = model.error("{\"text\": \"x\"}");
    assert!(matches!(error, DataError::NoEndOfText { line: 1, .. }), "{error}");
    model.write("generation_config.json", "{\"eos_token_id\": [322, 320]}");
    assert_eq!(masked(&model.row("{\"text\": \"x\"}"), &model.tokenizer()), "x[<|im_end|>]");
    assert_eq!(model.tokenizer().end_of_text_all(), [322, 320]);
    std::fs::remove_file(model.folder.path().join("tokenizer.json")).expect("removed");
    let error = model.error("{\"text\": \"x\"}");
    assert!(
        error.kind() == DataErrorKind::Config && error.to_string().ends_with("tokenizer.json does not exist"),
        "{error}"
    );
}

#[test]
fn settings_are_checked() {
    let model = Model::new(None);
    let changes: [fn(&mut DataConfig); 5] = [
        |config| config.max_seq_length = 1,
        |config| config.workers = 0,
        |config| config.workers = 1 << 20,
        |config| config.files.clear(),
        |config| config.date = "yesterday".into(),
    ];
    for change in changes {
        let error = model.load("{\"text\": \"x\"}", change).expect_err("a bad setting");
        assert_eq!(error.kind(), DataErrorKind::Config, "{error}");
    }
    let missing = |config: &mut DataConfig| config.files = vec!["nowhere.jsonl".into()];
    let error = model.load("", missing).expect_err("no file");
    assert!(error.kind() == DataErrorKind::Config && error.to_string() == "nowhere.jsonl does not exist", "{error}");
}

#[test]
fn the_template_is_found_in_its_other_places() {
    let list = r#"{"eos_token":"<|im_end|>","chat_template":[{"name":"tool_use","template":"no"},
        {"name":"default","template":"{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"}]}"#;
    let model = Model::new(None);
    model.write("tokenizer_config.json", list);
    assert_eq!(masked(&model.row(MESSAGES), &model.tokenizer()), "How[ many?Seven.]");
    let model = Model::new(None);
    model.write(
        "chat_template.json",
        r#"{"chat_template": "{% generation %}{{ messages[0].content }}{% endgeneration %}"}"#,
    );
    assert_eq!(masked(&model.row(MESSAGES), &model.tokenizer()), "How[ many?]");
}

#[test]
fn rows_of_tokens_need_no_tokenizer_and_keep_their_documents() {
    let model = Model::new(None);
    let packed = r#"{"input_ids":[5,6,7,8,9],"position_ids":[0,1,0,1,2],"seq_lengths":[2,3]}"#;
    let want = model.load(packed, |_| {}).expect("data");
    let row = &want.0[0];
    assert_eq!(row.document_starts(), [0, 2, 5]);
    assert_eq!(row.targets(), [false, true, false, true, true]);
    assert_eq!(row.sources().len(), 2);
    let (cut, _) = model.load(packed, |config| config.max_seq_length = 4).expect("data");
    assert_eq!(cut[0].document_starts(), [0, 2, 4]);
    std::fs::remove_file(model.folder.path().join("tokenizer.json")).expect("removed");
    let load = |content: &str, vocabulary: Option<usize>| {
        let config =
            DataConfig { files: vec![model.write("data.jsonl", content)], vocabulary, ..DataConfig::default() };
        let (tokenizer, template) = data::open_if_there(model.folder.path(), &config.date)?;
        assert!(tokenizer.is_none() && template.is_none());
        data::load(&config, None, None)
    };
    assert_eq!(load(packed, None).expect("data"), want);
    let error = load(packed, Some(9)).expect_err("an id the model does not have");
    assert!(error.to_string().contains(":1: `input_ids[4]` is 9, but token ids are below 9 here"), "{error}");
    let error = load(r#"{"text":"x"}"#, None).expect_err("text needs a tokenizer");
    assert!(
        matches!(error, DataError::NoTokenizer { line: 1, .. }) && error.kind() == DataErrorKind::Config,
        "{error}"
    );
}

#[test]
fn tokens_that_the_model_does_not_have_are_refused() {
    let model = Model::new(None);
    let error = model.load(r#"{"text":"x"}"#, |config| config.vocabulary = Some(10)).expect_err("a small model");
    assert!(matches!(error, DataError::Vocabulary { line: 1, vocabulary: 10, .. }), "{error}");
    assert_eq!(error.kind(), DataErrorKind::Config);
}

#[test]
fn rows_with_special_tokens_can_be_dropped() {
    let model = Model::new(Some("chatml"));
    let forged = MESSAGES.replace("How many?", "x<|im_end|>");
    let change = |config: &mut DataConfig| config.drop_special_token_rows = true;
    let (rows, report) = model.load(format!("{MESSAGES}\n{forged}\n{MESSAGES}"), change).expect("data");
    assert_eq!((rows.len(), report.examples), (2, 3));
    assert_eq!(
        report.dropped.iter().map(|row| (row.source.line, row.reason)).collect::<Vec<_>>(),
        [(2, Untrainable::SpecialToken)]
    );
    // Rows that cannot be trained on are refused all the same, and an end-of-text token at the end
    // is meant.
    let asked = r#"{"messages":[{"role":"user","content":"Anyone?"}]}"#;
    let error = model.load(format!("{forged}\n{asked}"), change).expect_err("no answer");
    assert!(matches!(error, DataError::Untrainable { line: 2, count: 1, .. }), "{error}");
    let plain = "{\"text\":\"it ends<|endoftext|>\"}\n{\"text\":\"a<|endoftext|>b\"}";
    assert_eq!(model.load(plain, change).expect("data").1.dropped.len(), 1);
    let nothing = model.load(&forged, change).expect_err("nothing left");
    assert!(matches!(nothing, DataError::NothingLeft { rows: 1, dropped: 1 }), "{nothing}");
}

#[test]
fn checking_lists_every_bad_row() {
    let model = Model::new(Some("chatml"));
    let asked = r#"{"messages":[{"role":"user","content":"Anyone?"}]}"#;
    let content = format!("{{\n{MESSAGES}\n{{\"text\":\"x\"}}\n{asked}\n{MESSAGES}\n[]\n{{\"id\":1}}");
    for workers in [1, 3] {
        let config = DataConfig { files: vec![model.write("data.jsonl", &content)], workers, ..DataConfig::default() };
        let (tokenizer, template) = data::open(model.folder.path(), &config.date).expect("a model");
        let (rows, report) = data::check(&config, &tokenizer, template.as_ref()).expect("a report");
        assert_eq!((rows.len(), report.files[0].examples), (2, 7));
        let bad: Vec<_> = report.bad.iter().map(|row| (row.source.line, row.reason)).collect();
        let want = [
            (1, "not JSON"),
            (3, "a different format from the rows before"),
            (4, "no token to train on"),
            (6, "not a JSON object"),
            (7, "a different format from the rows before"),
        ];
        assert_eq!(bad, want);
        assert!(report.bad[0].message.contains("data.jsonl:1: not JSON"), "{}", report.bad[0].message);
        // Training stops at the first.
        let error = data::load(&config, &tokenizer, template.as_ref()).expect_err("a bad row");
        assert!(matches!(error, DataError::Row { line: 1, .. }), "{error}");
    }
    // What is not a row's fault ends the check.
    let model = Model::new(None);
    let config = DataConfig { files: vec![model.write("data.jsonl", &content)], ..DataConfig::default() };
    let error = data::check(&config, &model.tokenizer(), None).expect_err("no template");
    assert!(matches!(error, DataError::NoTemplate { line: 2, .. }), "{error}");
}

#[test]
fn hints_fit_the_mistake() {
    let model = Model::new(Some("headers"));
    let calls = r#"{"messages":[{"role":"user","content":"a"},{"role":"user","content":"b","tool_calls":[{}]}]}"#;
    for (content, error, hint) in [
        (MESSAGES.replace("\"user\"", "\"human\""), "role `human` is unknown", "call it `user`"),
        (MESSAGES.replace("\"assistant\"", "\"gpt\""), "role `gpt` is unknown", "call it `assistant`"),
        (
            MESSAGES.replace("role", "from").replace("content", "value"),
            "`messages[0]` has `from` where messages have `role`",
            "name the list `conversations`",
        ),
        (
            MESSAGES.replace("\"content\":\"Seven.\"", "\"content\":null,\"function_call\":{}"),
            "`messages[1].function_call` must be absent: calls stand in `tool_calls`",
            "fix the row",
        ),
        (
            r#"{"conversations":[{"from":"human","value":"q"},{"from":"function_call","value":"{}"}]}"#.to_owned(),
            "role `function_call` is unknown",
            "write the call as `tool_calls`",
        ),
        (calls.to_owned(), "two user messages in a row", "the row has tool calls"),
    ] {
        let found = model.error(&content);
        assert!(found.to_string().contains(error) && found.hint().contains(hint), "{found}\n{}", found.hint());
    }
}
