//! `isobit eval`: loss, perplexity and accuracy of a model on data files, with or without an adapter.

use crate::Failure;
use crate::backend::{Chosen, Job, on_device};
use crate::model;
use crate::train::failed;
use isobit_kernels::Backend;
use isobit_training::batch::TokenRow;
use isobit_training::data::{self, DataConfig};
use isobit_training::prepare::{RunError, model_config, token_rows};
use isobit_training::step::{Evaluation, Trainer};
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: model::Arguments,
    /// Data files: JSONL or JSON arrays
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Longer examples lose their end
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    max_seq_length: u32,
    /// Rows computed together: changes the time, not the result
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=65536))]
    micro_batch_size: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let chosen = Chosen::parse(&arguments.model.device, arguments.model.threads)?;
    let rows = rows(arguments).map_err(|error| failed(&error))?;
    let evaluation = on_device(&chosen, Evaluating { arguments, rows: &rows })??;
    print(arguments, &evaluation).map_err(|error| Failure::output(&error))
}

fn rows(arguments: &Arguments) -> Result<Vec<TokenRow>, RunError> {
    let config = model_config(&arguments.model.model)?;
    let wanted = DataConfig {
        files: arguments.data.clone(),
        max_seq_length: (arguments.max_seq_length as usize).min(config.max_positions),
        ..DataConfig::default()
    };
    let (tokenizer, template) = data::open(&arguments.model.model, &wanted.date)?;
    let (dataset, _) = data::load(&wanted, &tokenizer, template.as_ref())?;
    token_rows(dataset.rows, config.vocabulary)
}

struct Evaluating<'a> {
    arguments: &'a Arguments,
    rows: &'a [TokenRow],
}

impl Job for Evaluating<'_> {
    type Result = Result<Evaluation, Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let model = &self.arguments.model;
        let longest = self.rows.iter().map(|row| row.tokens.len()).max().unwrap_or(1);
        let built = model.build(&backend, longest, true)?;
        let trainer = Trainer::new(backend, built);
        let rows: Vec<&TokenRow> = self.rows.iter().collect();
        let evaluation = trainer.evaluate(&rows, model.profile()?, self.arguments.micro_batch_size as usize);
        evaluation.map_err(|error| failed(&error.into()))
    }
}

fn print(arguments: &Arguments, evaluation: &Evaluation) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let (loss, perplexity, accuracy) = (evaluation.loss(), evaluation.perplexity(), evaluation.accuracy());
    if arguments.json {
        let value = serde_json::json!({"schema": "isobit.eval/1", "loss": loss, "loss_bits": format!("{:016x}", loss.to_bits()),
            "perplexity": perplexity, "accuracy": accuracy, "targets": evaluation.targets});
        writeln!(out, "{value}")?;
    } else {
        writeln!(
            out,
            "loss {loss:.6}, perplexity {perplexity:.4}, accuracy {accuracy:.4} over {} targets",
            evaluation.targets
        )?;
    }
    out.flush()
}
