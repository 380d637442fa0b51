//! Chat templates against `transformers`: texts, tokens, spans and masks written by
//! `tools/reference/chat_templates.py` must come out alike, to the last character.

use isobit_training::data::{self, DataConfig, RowError, Template, Tokenizer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn reference() -> Value {
    let text = std::fs::read_to_string(fixtures().join("rendered.json")).expect("the fixture is there");
    serde_json::from_str(&text).expect("the fixture is JSON")
}

fn template(name: &str, reference: &Value) -> Template {
    let source = std::fs::read_to_string(fixtures().join(format!("templates/{name}.jinja"))).expect("a template");
    let special: BTreeMap<String, String> = serde_json::from_value(reference["special"].clone()).expect("strings");
    Template::new(name, &source, reference["date"].as_str().expect("a date"), &special).expect("the template parses")
}

/// A row as JSON text. Keys of objects keep the order of the fixture, because its text is used as
/// it is.
fn row(case: &str) -> String {
    let from = case.find("\"messages\": ").expect("messages");
    let to = case.find(", \"prompt\": ").expect("prompt");
    format!("{{{}}}", &case[from..to])
}

/// Every case as the line of the file and as a value.
fn cases() -> Vec<(String, Value)> {
    let text = std::fs::read_to_string(fixtures().join("rendered.json")).expect("the fixture is there");
    let lines = text.lines().filter(|line| line.starts_with("{\"title\""));
    lines
        .map(|line| line.trim_end_matches(',').to_owned())
        .map(|line| (line.clone(), serde_json::from_str(&line).expect("a case")))
        .collect()
}

fn byte_spans(text: &str, spans: &Value) -> Vec<(usize, usize)> {
    let bytes: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let number = |value: &Value| usize::try_from(value.as_u64().expect("a position")).expect("small");
    let pairs = spans.as_array().expect("spans").iter();
    pairs.map(|pair| (bytes[number(&pair[0])], bytes[number(&pair[1])])).filter(|(start, end)| start < end).collect()
}

#[test]
fn texts_spans_and_tokens_are_those_of_the_reference() {
    let reference = reference();
    let tokenizer = Tokenizer::load(&fixtures()).expect("a tokenizer");
    let templates: BTreeMap<&str, Template> = ["chatml", "features", "headers", "marked", "thinking"]
        .into_iter()
        .map(|name| (name, template(name, &reference)))
        .collect();
    let cases = cases();
    assert_eq!(cases.len(), 150);
    let mut failures = Vec::new();
    for (line, case) in &cases {
        let (name, title) = (case["template"].as_str().expect("a name"), &case["title"]);
        let prompt = case["prompt"].as_bool().expect("a flag");
        let result = templates[name].render_row(&row(line), prompt);
        if let Some(want) = case.get("error") {
            let Err(RowError::Refused { message, .. }) = &result else { panic!("{name}, {title}: {result:?}") };
            assert_eq!(message, want.as_str().expect("a message"));
            continue;
        }
        let want = case["text"].as_str().expect("a text");
        match result {
            Err(error) => failures.push(format!("{name}, {title}: {error}")),
            Ok(rendered) if rendered.text != want => {
                let at = rendered.text.chars().zip(want.chars()).take_while(|(left, right)| left == right).count();
                let part = |text: &str| text.chars().skip(at.saturating_sub(20)).take(80).collect::<String>();
                failures.push(format!("{name}, {title}: at {at}: {:?}, want {:?}", part(&rendered.text), part(want)));
            }
            Ok(rendered) => {
                if let Some(spans) = case.get("spans") {
                    assert_eq!(rendered.spans, byte_spans(want, spans), "{name}, {title}");
                }
                let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).expect("tokens");
                assert_eq!(tokenizer.encode(&rendered.text, false).expect("tokens").tokens, tokens, "{name}, {title}");
            }
        }
    }
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

/// Hundreds of small templates: every operator, filter, test and method, numbers and white space.
#[test]
fn expressions_are_those_of_the_reference() {
    let text = std::fs::read_to_string(fixtures().join("expressions.json")).expect("the fixture is there");
    let reference: Value = serde_json::from_str(&text).expect("the fixture is JSON");
    let row = reference["row"].as_str().expect("a row");
    let special = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let cases = reference["cases"].as_array().expect("cases");
    assert!(cases.len() > 500);
    let mut failures = Vec::new();
    for case in cases {
        let source = case["source"].as_str().expect("a source");
        let result = Template::new("case", source, "2025-01-01", &special).map_err(|error| error.to_string());
        let result = result.and_then(|template| template.render_row(row, false).map_err(|error| error.to_string()));
        let result = result.map(|rendered| rendered.text).ok();
        if result.as_deref() != case["text"].as_str() {
            failures.push(format!("{source}: {result:?}, want {:?}", case["text"].as_str()));
        }
    }
    assert!(failures.is_empty(), "{} of {} differ:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn assignments_inside_a_generation_block_reach_the_namespace() {
    let source = "{% set ns = namespace(turns=0) %}{% for m in messages %}{% if m.role == 'assistant' %}\
                  {% generation %}{% set ns.turns = 1 %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}{{ ns.turns }}";
    let template = Template::new("case", source, "2025-01-01", &BTreeMap::new()).expect("a template");
    let row = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"bc"}]}"#;
    let rendered = template.render_row(row, false).expect("a text");
    assert_eq!((rendered.text.as_str(), rendered.spans), ("bc1", vec![(0, 2)]));
}

/// The template decides what becomes of content in parts, as it does in transformers.
#[test]
fn content_in_parts_is_for_the_template() {
    let row = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#;
    let render = |source: &str| {
        let template = Template::new("case", source, "2025-01-01", &BTreeMap::new()).expect("a template");
        template.render_row(row, false).map(|rendered| rendered.text)
    };
    let joined = "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}";
    assert_eq!(render(joined).as_deref(), Ok("<a><b>"));
    let printed = "[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]";
    assert_eq!(render("{{ messages[0].content }}").as_deref(), Ok(printed));
    let error = render("{{ messages[0].content + 'x' }}").expect_err("a list and a string");
    assert!(matches!(error, RowError::Render { .. }), "{error}");
}

#[test]
fn masks_are_those_of_the_reference() {
    let reference = reference();
    let tokenizer = Tokenizer::load(&fixtures()).expect("a tokenizer");
    let folder = tempfile::tempdir().expect("a folder");
    let mut compared = 0;
    for name in ["marked", "features"] {
        let template = template(name, &reference);
        let chosen: Vec<_> = cases()
            .into_iter()
            .filter(|(_, case)| case["template"] == name && case["prompt"] == false)
            .filter(|(_, case)| case["mask"].as_array().is_some_and(|mask| mask.iter().any(|flag| flag == 1)))
            .collect();
        let path = folder.path().join(format!("{name}.jsonl"));
        let rows: Vec<String> = chosen.iter().map(|(line, _)| row(line)).collect();
        std::fs::write(&path, rows.join("\n")).expect("a file");
        let config = DataConfig { files: vec![path], max_seq_length: 4096, ..DataConfig::default() };
        let (rows, _) = data::load(&config, &tokenizer, Some(&template)).expect("data");
        for (loaded, (_, case)) in rows.iter().zip(&chosen) {
            let mut mask: Vec<u8> = serde_json::from_value(case["mask"].clone()).expect("a mask");
            // Where the last character of a span takes several tokens the reference stops at the
            // first of them.
            let offsets = tokenizer.encode(case["text"].as_str().expect("a text"), false).expect("tokens").offsets;
            for index in 1..mask.len() {
                mask[index] |= u8::from(mask[index - 1] == 1 && offsets[index] == offsets[index - 1]);
            }
            let targets: Vec<u8> = loaded.targets().iter().map(|target| u8::from(*target)).collect();
            assert_eq!(targets, mask, "{name}, {}", case["title"]);
            compared += 1;
        }
    }
    // 16 conversations each, less the one without an answer, and for the second template the one
    // whose answer is empty.
    assert_eq!(compared, 15 + 14);
}
