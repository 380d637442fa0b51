//! What is fuzzed: entry points of the libraries that read untrusted input, each with a corpus from
//! the repository's own fixtures and a property that must hold besides "no panic".

use super::mutate::{Form, changed_bytes, mutated};
use super::random::Random;
use super::scene::CHAT_TEMPLATE;
use super::{fuzz_files, fuzz_manifest, fuzz_quantised, fuzz_record};
use crate::repository::root;
use isobit_models::{Config, peft};
use isobit_proof::difference;
use isobit_proof::safetensors::{SafeTensors, TensorFiles};
use isobit_training::config;
use isobit_training::data::{DATE_DEFAULT, DataConfig, Template, Tokenizer, load, open};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Checks one input; an error means a property does not hold. Refusing an input is not an error.
pub(crate) type Check = Box<dyn FnMut(&[u8]) -> Outcome>;
pub(crate) type Outcome = Result<Reached, String>;
pub(crate) type Corpus = Vec<Vec<u8>>;

/// How far an input got.
#[derive(Debug)]
pub(crate) enum Reached {
    Accepted,
    /// With this message.
    Refused(String),
}

#[expect(clippy::unnecessary_wraps, reason = "the outcome of a check")]
pub(crate) fn refused(error: impl std::fmt::Display) -> Outcome {
    Ok(Reached::Refused(error.to_string()))
}

pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// Its share of all inputs.
    pub(crate) share: usize,
    pub(crate) corpus: fn() -> Result<Corpus, String>,
    pub(crate) make: fn(&mut Random, &Corpus) -> Vec<u8>,
    /// Gets its own folder.
    pub(crate) prepare: fn(&Path) -> Result<Check, String>,
}

pub(crate) const TARGETS: [Target; 22] = [
    Target {
        name: "safetensors",
        share: 220,
        corpus: || fixtures(|path| is_named(path, "safetensors"), 12_000),
        make: |random, corpus| change(random, Form::Safetensors, corpus),
        prepare: |_| Ok(Box::new(safetensors)),
    },
    Target {
        name: "config-json",
        share: 160,
        corpus: || fixtures(|path| path.ends_with("config.json"), 1 << 20),
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: |_| Ok(Box::new(model_config)),
    },
    Target {
        name: "adapter-config",
        share: 120,
        corpus: || fixtures(|path| path.ends_with("adapter_config.json"), 1 << 20),
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: |_| Ok(Box::new(adapter_config)),
    },
    Target {
        name: "run-toml",
        share: 120,
        corpus: tomls,
        make: |random, corpus| change(random, Form::Toml, corpus),
        prepare: |_| Ok(Box::new(run_config)),
    },
    Target {
        name: "template",
        share: 50,
        corpus: templates,
        make: |random, corpus| change(random, Form::Template, corpus),
        prepare: |_| Ok(Box::new(template)),
    },
    Target {
        name: "conversation",
        share: 50,
        corpus: || Ok(CONVERSATIONS.map(|row| row.as_bytes().to_vec()).to_vec()),
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: conversation,
    },
    Target {
        name: "rows",
        share: 30,
        corpus: || Ok(ROWS.map(|rows| rows.as_bytes().to_vec()).to_vec()),
        make: |random, corpus| change(random, Form::JsonLines, corpus),
        prepare: |place| rows_of(place, "fuzz.jsonl"),
    },
    Target {
        name: "parquet",
        share: 60,
        corpus: parquet_files,
        make: parquet,
        prepare: |place| rows_of(place, "fuzz.parquet"),
    },
    Target {
        name: "tokenizer",
        share: 10,
        corpus: || Ok(vec![read(&root().join("crates/isobit/demo/tokenizer.json"))?]),
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: tokenizer,
    },
    Target {
        name: "decimal",
        share: 40,
        corpus: || Ok(Vec::new()),
        make: |random, _| number(random),
        prepare: |_| Ok(Box::new(decimal)),
    },
    Target {
        name: "diff",
        share: 15,
        corpus: || fixtures(|path| is_named(path, "safetensors"), 12_000),
        make: |random, corpus| change(random, Form::Safetensors, corpus),
        prepare: diff,
    },
    Target {
        name: "manifest",
        share: 15,
        corpus: || Ok(fuzz_manifest::corpus()),
        make: fuzz_manifest::made,
        prepare: fuzz_manifest::check,
    },
    Target {
        name: "chain",
        share: 10,
        corpus: fuzz_record::chains,
        make: fuzz_record::chain_made,
        prepare: fuzz_record::check_chain,
    },
    Target {
        name: "receipt",
        share: 10,
        corpus: fuzz_record::receipts,
        make: fuzz_record::receipt_made,
        prepare: fuzz_record::check_receipt,
    },
    Target {
        name: "statement",
        share: 10,
        corpus: fuzz_record::statements,
        make: fuzz_record::statement_made,
        prepare: fuzz_record::check_statement,
    },
    Target {
        name: "index",
        share: 60,
        corpus: fuzz_files::indexes,
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: fuzz_files::index,
    },
    Target {
        name: "quantisation",
        share: 60,
        corpus: fuzz_quantised::corpus,
        make: fuzz_quantised::made,
        prepare: fuzz_quantised::check,
    },
    Target {
        name: "csv",
        share: 40,
        corpus: || Ok(fuzz_files::TABLES.map(|text| text.as_bytes().to_vec()).to_vec()),
        make: |random, corpus| change(random, Form::Template, corpus),
        prepare: |place| rows_of(place, "fuzz.csv"),
    },
    Target {
        name: "template-entry",
        share: 30,
        corpus: fuzz_files::template_entries,
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: fuzz_files::template_entry,
    },
    Target {
        name: "trainer-state",
        share: 60,
        corpus: fuzz_files::states,
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: fuzz_files::state,
    },
    Target {
        name: "pointers",
        share: 60,
        corpus: || Ok(fuzz_files::POINTERS.map(|text| text.as_bytes().to_vec()).to_vec()),
        make: |random, corpus| change(random, Form::Json, corpus),
        prepare: fuzz_files::pointers,
    },
    Target {
        name: "metrics",
        share: 60,
        corpus: fuzz_files::metric_lines,
        make: |random, corpus| change(random, Form::JsonLines, corpus),
        prepare: fuzz_files::metrics,
    },
];

const CONVERSATIONS: [&str; 4] = [
    r#"{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"1+1?"},{"role":"assistant","content":"2"}]}"#,
    r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]},{"role":"assistant","content":"<think>\nx\n</think>\n\nho"}]}"#,
    r#"{"messages":[{"role":"user","content":"w?"},{"role":"assistant","content":"","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"x":1.5,"y":[null,true]}}}]},{"role":"tool","content":"7"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{}}}}]}"#,
    r#"{"messages":[{"role":"user","content":"é😀"},{"role":"assistant","content":"ja","reasoning_content":"r"}],"chat_template_kwargs":{"enable_thinking":false}}"#,
];

const ROWS: [&str; 6] = [
    "{\"prompt\":\"greet Ben:\",\"completion\":\" Ahoy, Ben!\"}\n{\"prompt\":\"leave Ben:\",\"completion\":\" Fair winds.\"}\n",
    "{\"text\":\"one two three\"}\n{\"text\":\"four\"}\n",
    "{\"instruction\":\"add\",\"input\":\"1 2\",\"output\":\"3\"}\n{\"instruction\":\"add\",\"input\":\"\",\"output\":\"5\"}\n",
    "{\"input_ids\":[1,2,3,4],\"labels\":[-100,-100,3,4]}\n{\"input_ids\":[5,6,7]}\n",
    "{\"conversations\":[{\"from\":\"human\",\"value\":\"hi\"},{\"from\":\"gpt\",\"value\":\"ho\"}]}\n",
    "[{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}]",
];

const TOML: &str = "base_model = \"model\"\noutput_dir = \"out\"\nseed = 42\ndevice = \"cpu\"\n\n[[datasets]]\npath = \"data.jsonl\"\n\n\
    [eval]\nval_set_size = 0.05\neval_steps = 5\n\n[training]\nmax_seq_length = 128\nmicro_batch_size = 2\n\
    gradient_accumulation_steps = 4\nnum_epochs = 1\nlearning_rate = 2e-4\nlr_scheduler_type = \"cosine\"\nwarmup_ratio = 0.03\n\
    save_steps = 10\nload_best_model_at_end = true\n\n[adapter]\ntype = \"lora\"\nlora_r = 8\nlora_alpha = 16\n\
    lora_target_modules = [\"q_proj\", \"v_proj\"]\nlayers_to_transform = [0, 1]\nrank_pattern = { q_proj = 4 }\n";

/// Mostly a small change; occasionally a long or deep one.
pub(crate) fn change(random: &mut Random, form: Form, corpus: &Corpus) -> Vec<u8> {
    if random.once_in(100) {
        let noise: Vec<u8> = (0..random.below(200)).map(|_| random.next() as u8).collect();
        return noise;
    }
    let base = random.pick(corpus).clone();
    let large = random.once_in(60);
    if random.once_in(10) { changed_bytes(random, &base) } else { mutated(random, form, &base, large) }
}

fn is_named(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|found| found == ending)
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, String> {
    super::run_folder::read(path)
}

/// Writes a new file: some file systems take milliseconds to overwrite one.
pub(crate) fn fresh(path: &Path, bytes: &[u8]) -> Result<(), String> {
    super::scene::remove(path)?;
    std::fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}

/// Fixture files of the models, in order of their names.
pub(crate) fn fixtures(wanted: impl Fn(&Path) -> bool, bytes_most: u64) -> Result<Corpus, String> {
    let mut folders = vec![root().join("crates/models/tests/fixtures")];
    let mut paths: Vec<PathBuf> = Vec::new();
    while let Some(folder) = folders.pop() {
        for name in super::run_folder::names(&folder)? {
            let path = folder.join(name);
            if path.is_dir() {
                folders.push(path);
            } else if wanted(&path) && path.metadata().is_ok_and(|found| found.len() <= bytes_most) {
                paths.push(path);
            }
        }
    }
    paths.sort();
    if paths.is_empty() {
        return Err("no fixture of this kind".to_string());
    }
    paths.iter().map(|path| read(path)).collect()
}

/// All but the one that is refused only after 64 MiB of rows.
fn parquet_files() -> Result<Corpus, String> {
    let folder = root().join("crates/training/tests/fixtures/parquet");
    let names = super::run_folder::names(&folder)?;
    let wanted = |name: &&String| name.ends_with(".parquet") && !name.contains("growth");
    names.iter().filter(wanted).map(|name| read(&folder.join(name))).collect()
}

/// Bytes changed in place, half of them in the footer: it is found from the end of the file.
fn parquet(random: &mut Random, corpus: &Corpus) -> Vec<u8> {
    let mut bytes = random.pick(corpus).clone();
    if random.once_in(8) {
        return changed_bytes(random, &bytes);
    }
    for _ in 0..=random.below(4) {
        let from_end = random.once_in(2);
        let at =
            if from_end { bytes.len() - 1 - random.below(bytes.len().min(1000)) } else { random.below(bytes.len()) };
        bytes[at] = match random.below(4) {
            0 => random.next() as u8,
            1 => *random.pick(&[0, 1, 0x7f, 0x80, 0xfe, 0xff]),
            _ => bytes[at] ^ 1 << random.below(8),
        };
    }
    bytes
}

fn templates() -> Result<Corpus, String> {
    let folder = root().join("crates/training/tests/fixtures/templates");
    let names = super::run_folder::names(&folder)?;
    let mut corpus = names.iter().map(|name| read(&folder.join(name))).collect::<Result<Corpus, String>>()?;
    corpus.push(CHAT_TEMPLATE.as_bytes().to_vec());
    corpus.push(b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}".to_vec());
    Ok(corpus)
}

fn tomls() -> Result<Corpus, String> {
    let run = config::parse("corpus.toml", TOML, &[]).map_err(|error| format!("the config of the corpus: {error}"))?;
    let printed = run.run.to_toml().into_bytes();
    let pattern = TOML.replace("[\"q_proj\", \"v_proj\"]\nlayers_to_transform = [0, 1]", "\".*q_proj\"");
    Ok(vec![TOML.as_bytes().to_vec(), pattern.into_bytes(), printed, read(&root().join("examples/lora.toml"))?])
}

fn safetensors(input: &[u8]) -> Outcome {
    let file = match SafeTensors::from_bytes("fuzz.safetensors", input.to_vec()) {
        Ok(file) => file,
        Err(error) => return refused(error),
    };
    let mut bytes = 0;
    for tensor in file.tensors() {
        bytes += tensor.bytes.len();
        if tensor.dtype.bytes_of(tensor.shape) != Some(tensor.bytes.len()) {
            return Err(format!("{} holds {} bytes", tensor.name, tensor.bytes.len()));
        }
        let found = file.get(tensor.name).map_err(|error| error.to_string())?;
        if found.bytes != tensor.bytes {
            return Err(format!("{} is found as a different tensor", tensor.name));
        }
        let _ = (tensor.to_f32(), tensor.to_i32(), tensor.to_i64(), tensor.bf16_bits(), tensor.f16_bits());
    }
    if bytes > input.len() {
        return Err(format!("{bytes} bytes of tensors in {} of file", input.len()));
    }
    Ok(Reached::Accepted)
}

fn model_config(input: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(input);
    let config = match Config::parse(&text) {
        Ok(config) => config,
        Err(error) => return refused(error),
    };
    // Parsing again gives the same result.
    match Config::parse(&text) {
        Ok(again) if format!("{again:?}") == format!("{config:?}") => Ok(Reached::Accepted),
        _ => Err("reading it twice gives two results".to_string()),
    }
}

fn adapter_config(input: &[u8]) -> Outcome {
    let lora = match peft::parse_config(&String::from_utf8_lossy(input)) {
        Ok(lora) => lora,
        Err(error) => return refused(error),
    };
    // What was accepted can be written, and is then accepted again.
    let written = peft::config_json(&lora, "base").to_string();
    let again = peft::parse_config(&written);
    again.map(|_| Reached::Accepted).map_err(|error| format!("{error} in what was written: {written}"))
}

fn run_config(input: &[u8]) -> Outcome {
    let settled = match config::parse("fuzz.toml", &String::from_utf8_lossy(input), &[]) {
        Ok(settled) => settled,
        Err(error) => return refused(error),
    };
    let printed = settled.run.to_toml();
    match config::parse("printed.toml", &printed, &[]) {
        Ok(again) if again.run == settled.run => Ok(Reached::Accepted),
        Ok(_) => Err("printing and reading it gives a different run".to_string()),
        Err(error) => Err(format!("what it prints does not parse: {error}")),
    }
}

fn template(input: &[u8]) -> Outcome {
    let tokens = BTreeMap::from([("eos_token".to_string(), "</s>".to_string())]);
    let template = match Template::new("fuzz", &String::from_utf8_lossy(input), DATE_DEFAULT, &tokens) {
        Ok(template) => template,
        Err(error) => return refused(error),
    };
    let mut reached = Reached::Accepted;
    for row in CONVERSATIONS {
        let (first, second) = (template.render_row(row, true), template.render_row(row, true));
        match (first, second) {
            (Ok(first), Ok(second)) if first == second => spans_fit(&first.text, &first.spans)?,
            (Err(error), Err(_)) => reached = Reached::Refused(error.to_string()),
            _ => return Err("rendering it twice gives two results".to_string()),
        }
    }
    Ok(reached)
}

fn spans_fit(text: &str, spans: &[(usize, usize)]) -> Result<(), String> {
    let fits = |&(begin, end): &(usize, usize)| text.get(begin..end).is_some();
    if spans.iter().all(fits) { Ok(()) } else { Err("a span outside the text".to_string()) }
}

fn conversation(_: &Path) -> Result<Check, String> {
    let tokens = BTreeMap::from([("eos_token".to_string(), "</s>".to_string())]);
    let new = |source: &Vec<u8>| {
        let template = Template::new("corpus", &String::from_utf8_lossy(source), DATE_DEFAULT, &tokens);
        template.map_err(|error| error.to_string())
    };
    let templates = templates()?.iter().map(new).collect::<Result<Vec<Template>, String>>()?;
    Ok(Box::new(move |input| {
        let text = String::from_utf8_lossy(input);
        let mut reached = Reached::Accepted;
        for template in &templates {
            match template.render_row(&text, false) {
                Ok(rendered) => spans_fit(&rendered.text, &rendered.spans)?,
                Err(error) => reached = Reached::Refused(error.to_string()),
            }
        }
        Ok(reached)
    }))
}

/// A model folder for data: the demo's tokenizer and a chat template.
pub(crate) fn model_folder(place: &Path) -> Result<PathBuf, String> {
    let folder = place.join("fuzz-model");
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    // A worker of another target may have left its inputs here.
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(failed)?;
    }
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let tokenizer = read(&root().join("crates/isobit/demo/tokenizer.json"))?;
    std::fs::write(folder.join("tokenizer.json"), tokenizer).map_err(failed)?;
    std::fs::write(folder.join("tokenizer_config.json"), "{\"eos_token\":\"<|im_end|>\"}").map_err(failed)?;
    std::fs::write(folder.join("chat_template.jinja"), CHAT_TEMPLATE).map_err(failed)?;
    Ok(folder)
}

/// Rows of a data file called `name`.
fn rows_of(place: &Path, name: &str) -> Result<Check, String> {
    let (tokenizer, template) = open(&model_folder(place)?, DATE_DEFAULT).map_err(|error| error.to_string())?;
    let path = place.join(name);
    let config = DataConfig {
        files: vec![path.clone()],
        max_seq_length: 24,
        allow_untrainable_rows: true,
        ..DataConfig::default()
    };
    Ok(Box::new(move |input| {
        fresh(&path, input)?;
        let (rows, report) = match load(&config, &tokenizer, template.as_ref()) {
            Ok(loaded) => loaded,
            Err(error) => return refused(error),
        };
        for row in &rows {
            let fits = row.tokens().len() == row.targets().len()
                && row.tokens().len() <= config.max_seq_length
                && row.document_starts().first() == Some(&0)
                && row.document_starts().last() == Some(&row.tokens().len());
            if !fits {
                return Err(format!("a row of {} tokens that does not fit together", row.tokens().len()));
            }
        }
        let tokens: usize = rows.iter().map(|row| row.tokens().len()).sum();
        if tokens as u64 == report.tokens {
            Ok(Reached::Accepted)
        } else {
            Err(format!("{tokens} tokens, {} reported", report.tokens))
        }
    }))
}

fn tokenizer(place: &Path) -> Result<Check, String> {
    let folder = model_folder(place)?;
    Ok(Box::new(move |input| {
        fresh(&folder.join("tokenizer.json"), input)?;
        let tokenizer = match Tokenizer::load(&folder) {
            Ok(tokenizer) => tokenizer,
            Err(error) => return refused(error),
        };
        for text in ["greet Anna: hello", "é😀\u{0}<|im_end|>", ""] {
            let Ok(encoding) = tokenizer.encode(text, true) else { continue };
            drop(encoding);
            let _ = tokenizer.decode(&[0, 1, 320, 351, u32::MAX]);
        }
        Ok(Reached::Accepted)
    }))
}

/// Bits of a number, with all exponents equally likely.
fn number(random: &mut Random) -> Vec<u8> {
    let bits = random.next();
    let bits = match random.below(4) {
        0 => bits & !((1 << random.below(52)) - 1),
        1 => f64::from(f32::from_bits(bits as u32)).to_bits(),
        _ => bits,
    };
    bits.to_le_bytes().to_vec()
}

fn decimal(input: &[u8]) -> Outcome {
    let value = f64::from_le_bytes(*input.first_chunk().ok_or("an input of eight bytes")?);
    let text = difference::decimal(value);
    let back: f64 = text.parse().map_err(|error| format!("`{text}`: {error}"))?;
    let same = back.to_bits() == value.to_bits() || (back.is_nan() && value.is_nan());
    if same { Ok(Reached::Accepted) } else { Err(format!("{:#x} is printed as {text}", value.to_bits())) }
}

fn diff(place: &Path) -> Result<Check, String> {
    let paths = ["fuzz-a.safetensors", "fuzz-b.safetensors"].map(|name| place.join(name));
    let first = fixtures(|path| is_named(path, "safetensors"), 12_000)?.swap_remove(0);
    std::fs::write(&paths[0], first).map_err(|error| error.to_string())?;
    Ok(Box::new(move |input| {
        fresh(&paths[1], input)?;
        let _ = difference::compare(&paths[0], &paths[1], 1);
        // A readable file is equal to itself.
        if let Err(error) = TensorFiles::open_file(&paths[1]) {
            return refused(error);
        }
        match difference::compare(&paths[1], &paths[1], 1) {
            Ok(found) if found.is_none() => Ok(Reached::Accepted),
            Ok(_) => Err("a file that differs from itself".to_string()),
            Err(error) => Err(format!("a file that opens and cannot be compared: {error}")),
        }
    }))
}
