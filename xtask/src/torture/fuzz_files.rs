//! Further targets of `fuzz`: files that are read from a folder in which others stand, as they do
//! in a model folder or a run folder.

use super::fuzz_targets::{Check, Corpus, Reached, fresh, model_folder, read, refused};
use super::scene::CHAT_TEMPLATE;
use crate::repository::root;
use isobit_proof::Manifest;
use isobit_proof::safetensors::{SafeTensors, TensorFiles};
use isobit_training::checkpoint::{self, Identity, Progress};
use isobit_training::data::{DATE_DEFAULT, open};
use isobit_training::metrics::{self, CutMetrics, Event, Metrics, Record, Timing, without_timing};
use std::path::{Path, PathBuf};

fn folder(place: &Path, name: &str) -> Result<PathBuf, String> {
    let folder = place.join(name);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder)
}

fn sharded() -> PathBuf {
    root().join("crates/models/tests/fixtures/qwen2-base/sharded")
}

pub(crate) fn indexes() -> Result<Corpus, String> {
    Ok(vec![read(&sharded().join("model.safetensors.index.json"))?])
}

/// Every tensor of an index that is accepted can be read.
pub(crate) fn index(place: &Path) -> Result<Check, String> {
    let folder = folder(place, "fuzz-index")?;
    for name in super::run_folder::names(&sharded())?.iter().filter(|name| name.ends_with(".safetensors")) {
        fresh(&folder.join(name), &read(&sharded().join(name))?)?;
    }
    Ok(Box::new(move |input| {
        fresh(&folder.join("model.safetensors.index.json"), input)?;
        let files = match TensorFiles::open(&folder) {
            Ok(files) => files,
            Err(error) => return refused(error),
        };
        for tensor in files.files().iter().flat_map(SafeTensors::tensors) {
            let _ = files.get(tensor.name);
        }
        Ok(Reached::Accepted)
    }))
}

pub(crate) const TABLES: [&str; 4] = [
    "prompt,completion\ngreet Ben:, Ahoy!\n\"leave, Ben:\",\" Fair \"\"winds\"\".\"\n",
    "instruction,input,output\nadd,1 2,3\nadd,,\"5\n6\"\n",
    "text\none two three\n\u{feff}four\n",
    "messages\n\"[{\"\"role\"\":\"\"user\"\",\"\"content\"\":\"\"a\"\"},{\"\"role\"\":\"\"assistant\"\",\"\"content\"\":\"\"b\"\"}]\"\n",
];

#[expect(clippy::unnecessary_wraps, reason = "an entry of the table of targets")]
pub(crate) fn template_entries() -> Result<Corpus, String> {
    let template = serde_json::Value::from(CHAT_TEMPLATE);
    let entries = [
        serde_json::json!({"eos_token": "<|im_end|>", "chat_template": template}),
        serde_json::json!({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": null, "add_bos_token": true,
            "chat_template": [{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ tools }}"}]}),
        serde_json::json!({"added_tokens_decoder": {"320": {"content": "<|im_end|>", "special": true}},
            "model_max_length": 1e30, "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}),
    ];
    Ok(entries.iter().map(|entry| entry.to_string().into_bytes()).collect())
}

pub(crate) fn template_entry(place: &Path) -> Result<Check, String> {
    let folder = model_folder(place)?;
    super::scene::remove(&folder.join("chat_template.jinja"))?;
    Ok(Box::new(move |input| {
        for name in ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"] {
            fresh(&folder.join(name), input)?;
        }
        open(&folder, DATE_DEFAULT).map(|_| Reached::Accepted).or_else(refused)
    }))
}

pub(crate) fn states() -> Result<Corpus, String> {
    let digest = |letter: &str| letter.repeat(64);
    let identity = Identity {
        run: digest("a"),
        data: digest("b"),
        base: digest("c"),
        profile: "x2".to_string(),
        numerics: isobit_numerics::VERSION.to_string(),
        start: None,
        load_in_4bit: None,
    };
    let mut progress = Progress::start(identity);
    (progress.step, progress.rows_seen, progress.loss_sum, progress.loss_count) = (4, 8, 5.5, 2);
    progress.take_eval(1.25);
    Ok(vec![serde_json::to_string_pretty(&progress).map_err(|error| error.to_string())?.into_bytes()])
}

/// The state of a checkpoint whose manifest is right.
pub(crate) fn state(place: &Path) -> Result<Check, String> {
    let run = folder(place, "fuzz-run")?;
    let folder = folder(&run, "checkpoint-4")?;
    let names = [checkpoint::ADAPTER, checkpoint::ADAPTER_CONFIG, checkpoint::OPTIMIZER, checkpoint::STATE];
    for name in names {
        fresh(&folder.join(name), b"{}")?;
    }
    Ok(Box::new(move |input| {
        fresh(&folder.join(checkpoint::STATE), input)?;
        let manifest = Manifest::of(&folder, names).map_err(|error| error.to_string())?;
        super::scene::remove(&folder.join(Manifest::NAME))?;
        manifest.write(&folder).map_err(|error| error.to_string())?;
        let progress = match checkpoint::inspect(&folder) {
            Ok(progress) => progress,
            Err(error) => return refused(error),
        };
        // What was read can be written, and is then read as the same.
        let text = serde_json::to_string(&progress).map_err(|error| error.to_string())?;
        let again = serde_json::from_str::<Progress>(&text).ok().and_then(|again| serde_json::to_string(&again).ok());
        if again.as_ref() == Some(&text) {
            return Ok(Reached::Accepted);
        }
        Err(format!("another state is read from what was written: {text}"))
    }))
}

pub(crate) const POINTERS: [&str; 3] = [
    "{\"schema\":\"isobit.pointer/1\",\"checkpoint\":\"checkpoint-4\",\"step\":4,\"metric\":1.5,\"metric_bits\":\"3ff8000000000000\"}",
    "{\"schema\":\"isobit.pointer/1\",\"checkpoint\":null,\"step\":0}",
    "{\"schema\":\"isobit.stopped/1\",\"steps\":[4,7]}",
];

/// `latest.json`, `best.json` and `stopped.json` of a run.
pub(crate) fn pointers(place: &Path) -> Result<Check, String> {
    let run = folder(place, "fuzz-pointers")?;
    folder(&run, "checkpoint-4")?;
    Ok(Box::new(move |input| {
        for name in ["latest.json", "best.json", "stopped.json"] {
            fresh(&run.join(name), input)?;
        }
        let stopped = checkpoint::announce(&run, 4, true);
        match (checkpoint::latest(&run), checkpoint::best(&run), stopped) {
            (Ok(_), Ok(_), _) | (_, _, Ok(())) => Ok(Reached::Accepted),
            (Err(error), _, Err(_)) if input.starts_with(b"{\"schema\":\"isobit.p") => refused(error),
            (_, _, Err(error)) => refused(error),
        }
    }))
}

#[expect(clippy::unnecessary_wraps, reason = "an entry of the table of targets")]
pub(crate) fn metric_lines() -> Result<Corpus, String> {
    let record = |step: u64, event: Event| {
        let timing = Timing { seconds: 0.5, tokens_per_s: 20.0, communication_s: None };
        Record { step, epoch: 0.5, tokens: 7 * step, event, timing: Some(timing) }.to_line()
    };
    let train = Event::Train { loss: 1.5, learning_rate: 2e-4, grad_norm: 0.1 };
    let eval = Event::Eval { loss: 2.5, accuracy: 0.25, tokens: 12 };
    let lines = [record(1, train), record(2, train), record(2, eval)];
    Ok(vec![(lines.join("\n") + "\n").into_bytes()])
}

/// Lines that a run resumes after, with checksums and without.
pub(crate) fn metrics(place: &Path) -> Result<Check, String> {
    let run = folder(place, "fuzz-metrics")?;
    Ok(Box::new(move |input| {
        fresh(&run.join(metrics::NAME), input)?;
        for line in String::from_utf8_lossy(input).lines() {
            let once = without_timing(line);
            let is_whole = [",\"timing\":", ",\"check\":"].iter().all(|part| !once.contains(part));
            if is_whole && without_timing(&once) != once {
                return Err(format!("timing is cut twice: {line}"));
            }
        }
        match Metrics::cut(&run, 2, None).and_then(CutMetrics::commit) {
            Ok(first) => {
                // What stays, stays again.
                let again = Metrics::cut(&run, 2, Some(first.digest())).and_then(CutMetrics::commit);
                let same = again.is_ok_and(|again| again.digest() == first.digest());
                if same { Ok(Reached::Accepted) } else { Err("what was kept is refused".to_string()) }
            }
            Err(error) => refused(error),
        }
    }))
}
