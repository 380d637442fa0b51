//! Texts before and after a run: `generate_prompts` of the config, continued greedily by the model
//! that the run started from and by its result. They are made once the run has finished, from the
//! folders that anybody can load, and written to `samples.json` beside the metrics; the weights and
//! the metrics are those of a run without prompts.

use crate::Failure;
use crate::backend::{Chosen, Job, on_device};
use crate::generate::{SamplingArguments, Texts, continued};
use crate::model::{self, Options};
use crate::stderr::tell;
use isobit_kernels::Backend;
use isobit_proof::atomic::write_atomically;
pub(crate) use isobit_proof::layout::SAMPLES as NAME;
use isobit_proof::regular;
use isobit_training::checkpoint::FINAL;
use isobit_training::config::{Adapter, Run};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

const SCHEMA: &str = "isobit.samples/1";
/// BOUND: bytes of the file, far more than prompts and texts of a config can take.
const BYTES_MAX: u64 = 1 << 26;

/// A prompt and what the models make of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) prompt: String,
    pub(crate) before: String,
    pub(crate) after: String,
}

#[derive(Serialize, Deserialize)]
struct File {
    schema: String,
    samples: Vec<Sample>,
}

/// Writes the samples of a finished run. The run is complete without them: what goes wrong is told.
pub(crate) fn write(run: &Run, quiet: bool) {
    if run.generate_prompts.is_empty() {
        return;
    }
    if let Err(failure) = made(run).and_then(|samples| put(run, samples)) {
        tell(&format!("warning: no samples are written: {}", failure.message));
    } else if !quiet {
        tell(&format!("samples: {}", run.output_dir.join(NAME).display()));
    }
}

/// Refuses a run that would have to overwrite a file that is not ours, before its first update.
pub(crate) fn check(run: &Run) -> Result<(), Failure> {
    let path = run.output_dir.join(NAME);
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    if run.generate_prompts.is_empty() || found.is_file() && read(&run.output_dir).is_ok() {
        return Ok(());
    }
    let message = format!("{} is not a file of samples and is not overwritten", path.display());
    Err(Failure { code: 7, message, hint: Some("move it away, or choose another `output_dir`".to_string()) })
}

/// The samples in a run's folder; none if it has no such file.
pub(crate) fn read(folder: &Path) -> Result<Vec<Sample>, String> {
    let path = folder.join(NAME);
    let text = regular::if_there(regular::read_text(&path, BYTES_MAX)).map_err(|error| error.to_string())?;
    let Some(text) = text else { return Ok(Vec::new()) };
    match serde_json::from_str::<File>(&text) {
        Ok(file) if file.schema == SCHEMA => Ok(file.samples),
        Ok(_) => Err(format!("{} was not written by this program", path.display())),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn put(run: &Run, samples: Vec<Sample>) -> Result<(), Failure> {
    let file = File { schema: SCHEMA.to_string(), samples };
    let text = serde_json::to_string_pretty(&file).expect("texts can be written as JSON");
    let path = run.output_dir.join(NAME);
    Ok(write_atomically(&path, text.as_bytes())?)
}

fn made(run: &Run) -> Result<Vec<Sample>, Failure> {
    let [device] = &run.devices[..] else {
        return Err(Failure::usage("the layers are divided among several devices", "use `isobit generate`"));
    };
    let arguments = |model: PathBuf, adapter: Option<PathBuf>| model::Arguments {
        model,
        options: Options {
            adapter,
            device: Some(device.to_string()),
            threads: Some(run.threads as usize),
            profile: Some(run.profile.name().to_string()),
            load_in_4bit: run.load_in_4bit,
            template_var: Vec::new(),
            quiet: true,
        },
    };
    let last = run.output_dir.join(FINAL);
    let (before, after) = match &run.adapter {
        Adapter::Lora(lora) => {
            (arguments(run.base_model.clone(), lora.resume_from.clone()), arguments(run.base_model.clone(), Some(last)))
        }
        Adapter::Full | Adapter::LastBlocks(_) => (arguments(run.base_model.clone(), None), arguments(last, None)),
    };
    let chosen = Chosen::parse(&device.to_string(), run.threads as usize)?;
    let texts = |models: &[&model::Arguments; 2]| -> Result<Vec<Vec<String>>, Failure> {
        // One after the other: only one is in memory.
        models.iter().map(|model| on_device(&chosen, true, Continuing { run, model })?).collect()
    };
    let all = texts(&[&before, &after])?;
    let samples = run.generate_prompts.iter().zip(all[0].iter().zip(&all[1]));
    Ok(samples
        .map(|(prompt, (before, after))| Sample {
            prompt: prompt.clone(),
            before: before.clone(),
            after: after.clone(),
        })
        .collect())
}

/// Continues every prompt of a run with one model.
struct Continuing<'a> {
    run: &'a Run,
    model: &'a model::Arguments,
}

impl Job for Continuing<'_> {
    type Result = Result<Vec<String>, Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { run, model } = self;
        let texts = Texts::open(model)?;
        let prompts = run.generate_prompts.iter().map(|prompt| texts.tokens(prompt, true));
        let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + run.generate_tokens as usize;
        let built = model.build(&backend, longest.min(texts.max_positions), model.options.adapter.is_some())?;
        let rule = (SamplingArguments::GREEDY.rule()?, run.generate_tokens);
        let one = |prompt: &Vec<u32>| {
            let added = continued(&backend, &built, &texts, run.profile, prompt, rule, &mut |_| Ok(true))?;
            Ok(texts.tokenizer.decode(&added))
        };
        prompts.iter().map(one).collect()
    }
}
