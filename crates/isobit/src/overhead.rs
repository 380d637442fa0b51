//! Memory beside the buffers that a plan counts: of the process on the host, of the driver on a
//! card. These are upper estimates from measurements; `cargo xtask plan-table` repeats them
//! (docs/memory.md).

use isobit_kernels::gpu::Api;
use isobit_training::config::{Adapter, EvalRows, Run};
use isobit_training::data::{Extent, READER_STACK_BYTES, extent};
use isobit_training::plan::{Item, MemoryPlan};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The process itself, its threads, and pages that its allocator keeps.
const PROCESS_BYTES: u64 = 18 << 20;
const BYTES_PER_THREAD: u64 = 1 << 20;
/// Bytes of a tokenizer in memory for each byte of `tokenizer.json`. It is dropped before weights
/// are loaded.
const PER_TOKENIZER_BYTE: u64 = 10;
/// Bytes of a token of a row, and whether it is a target. Rows are cut at the maximum length; a
/// token may stand for a single byte of a file: of digits or hexadecimal text most do.
const BYTES_PER_TOKEN: u64 = 5;
/// Bytes for each byte of a row while it is turned into tokens, all of it, however many are kept:
/// 230 of prose, 381 of single digits between spaces. They are gone before weights are loaded.
const PER_BYTE_OF_LONGEST: u64 = 400;
/// Bytes of a row beside its text and tokens, while its file is read; in a Parquet file with the
/// JSON that it becomes.
const PER_ROW: u64 = 480;
const PER_PARQUET_ROW: u64 = 768;

/// Address space of a computing thread: its stack, and what the system maps with it.
const STACK_BYTES: u64 = 3 << 20;
/// What the system maps with a thread that reads data, beside its stack.
const READER_BESIDE_STACK_BYTES: u64 = 1 << 20;
/// Beside these threads: the process, records and rows.
const READING_BYTES: u64 = 16 << 20;

/// A CUDA context with the modules of a run, and tables that a plan does not count.
const CUDA_CONTEXT_BYTES: u64 = 552 << 20;
/// Other drivers were never measured. Assumed: their context, and that gaps take an eighth of the
/// buffers that come and go in a step.
const ASSUMED_CONTEXT_BYTES: u64 = 512 << 20;
const ASSUMED_GAP_DIVISOR: u64 = 8;

/// Host memory of a run on the CPU beside the `counted` bytes of its buffers.
pub(crate) fn of_process(run: &Run, threads: usize, counted: u64) -> u64 {
    let process = PROCESS_BYTES.saturating_add(BYTES_PER_THREAD.saturating_mul(threads as u64));
    let process = process.saturating_add(of_rows(run));
    let tokenizer = std::fs::metadata(run.base_model.join("tokenizer.json")).map_or(0, |about| about.len());
    let reading = tokenizer.saturating_mul(PER_TOKENIZER_BYTE).saturating_add(of_longest_rows(run));
    process.saturating_add(reading.saturating_sub(counted))
}

/// The longest row while its whole text is turned into tokens, in every thread that reads data.
fn of_longest_rows(run: &Run) -> u64 {
    let of_file = |path: &Path| {
        let Extent { rows, longest, .. } = counted_once(path);
        longest.saturating_mul(PER_BYTE_OF_LONGEST).saturating_mul(rows.min(u64::from(run.data_workers)))
    };
    data_files(run).map(|path| of_file(path)).max().unwrap_or(0)
}

/// The rows of all data files.
fn of_rows(run: &Run) -> u64 {
    let length = u64::from(run.training.max_seq_length);
    let of_file = |path: &Path| {
        let is_parquet = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("parquet"));
        let per_row = if is_parquet { PER_PARQUET_ROW } else { PER_ROW };
        let Extent { rows, bytes, .. } = counted_once(path);
        let tokens = bytes.min(rows.saturating_mul(length));
        rows.saturating_mul(per_row).saturating_add(tokens.saturating_mul(BYTES_PER_TOKEN))
    };
    data_files(run).map(|path| of_file(path)).fold(0, u64::saturating_add)
}

/// How much there is in a data file. A command plans many settings of one run: each file is read
/// once.
fn counted_once(path: &Path) -> Extent {
    static COUNTED: Mutex<BTreeMap<PathBuf, Extent>> = Mutex::new(BTreeMap::new());
    let mut counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    *counted.entry(path.to_path_buf()).or_insert_with(|| extent(path).unwrap_or_default())
}

/// Data files of a run, those of its evaluation too.
pub(crate) fn data_files(run: &Run) -> impl Iterator<Item = &PathBuf> {
    let evaluated = match &run.eval.rows {
        EvalRows::File(path) => Some(path),
        EvalRows::None | EvalRows::Count(_) | EvalRows::Share(_) => None,
    };
    run.datasets.iter().chain(evaluated)
}

/// Address space of a run on the CPU beside the `needed` bytes of memory: `mapped` bytes of
/// weights, and the stacks of `threads`. Before anything else is there, data are read by threads
/// with stacks of their own; the larger of both counts.
pub(crate) fn address_space(run: &Run, mapped: u64, threads: usize, needed: u64) -> u64 {
    let computing = (threads as u64).saturating_mul(STACK_BYTES).saturating_add(mapped);
    let reader = READER_STACK_BYTES as u64 + READER_BESIDE_STACK_BYTES;
    let reading = u64::from(run.data_workers).saturating_mul(reader).saturating_add(READING_BYTES);
    computing.max(reading.saturating_sub(needed))
}

/// Address space that the samples at the end of a run take beyond its peak: they map the weights a
/// second time, when the buffers of training are gone.
pub(crate) fn address_space_of_samples(run: &Run, plan: &MemoryPlan, mapped: u64) -> u64 {
    if run.generate_prompts.is_empty() {
        return 0;
    }
    let again = match run.adapter {
        Adapter::Lora(_) => mapped,
        Adapter::Full | Adapter::LastBlocks(_) => mapped.max((plan.trained_count * size_of::<f32>()) as u64),
    };
    let gone = plan.bytes_on_host().saturating_sub(plan.bytes_generate + plan.host_bytes_generate);
    again.saturating_sub(gone as u64)
}

/// Bytes of the weight files, which a run maps.
pub(crate) fn mapped_weight_bytes(run: &Run) -> u64 {
    let files = std::fs::read_dir(&run.base_model).into_iter().flatten().flatten();
    let weights = files.filter(|file| file.path().extension().is_some_and(|ending| ending == "safetensors"));
    let weights = weights.filter_map(|file| std::fs::metadata(file.path()).ok()).map(|about| about.len());
    weights.fold(0, u64::saturating_add)
}

/// Memory of a card beside the buffers of the stages on it. A process has one context of a card,
/// but one for each stage in OpenCL.
pub(crate) fn of_driver<'a>(api: Api, stages: impl Iterator<Item = &'a MemoryPlan>) -> u64 {
    let moving = |plan: &MemoryPlan| (plan.items[&Item::Activations] + plan.items[&Item::Workspace]) as u64;
    let gaps = |plan: &MemoryPlan| plan.bytes_of_gaps() as u64;
    let add = |(count, sum, all): (u64, u64, u64), plan| (count + 1, sum + moving(plan), all + gaps(plan));
    let (count, moving, gaps) = stages.fold((0, 0, 0), add);
    match api {
        Api::Cuda => CUDA_CONTEXT_BYTES + gaps,
        Api::Hip => ASSUMED_CONTEXT_BYTES + moving / ASSUMED_GAP_DIVISOR,
        Api::OpenCl => count * ASSUMED_CONTEXT_BYTES + moving / ASSUMED_GAP_DIVISOR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_training::config;

    #[test]
    fn a_tokenizer_counts_only_where_it_is_larger_than_the_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("tokenizer.json"), vec![b' '; 3 << 20]).expect("written");
        // Rows are so short that they take less than a MiB themselves, and while they are read.
        let row = format!("{}\n", " ".repeat(1023));
        std::fs::write(path("data.jsonl"), row.repeat(1 << 10)).expect("written");
        let text = format!(
            "base_model = {:?}\noutput_dir = \"out\"\n[[datasets]]\npath = {:?}\n[training]\nmax_steps = 1\n",
            folder.path().display().to_string(),
            path("data.jsonl")
        );
        let run = config::parse("the config", &text, &[]).expect("a config").run;
        let of = |run: &Run, counted| of_process(run, 2, counted) >> 20;
        assert_eq!(of(&run, 1 << 30), 18 + 2 + 5);
        assert_eq!(of(&run, 10 << 20), 18 + 2 + 5 + 20);
        // Rows are cut: what is cut off does not stay.
        let mut short = run.clone();
        short.training.max_seq_length = 64;
        assert_eq!(of(&short, 1 << 30), 18 + 2);
    }

    #[test]
    fn rows_count_by_themselves_and_those_of_the_evaluation_too() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("data.csv"), "a,b\n".repeat(1 << 20)).expect("written");
        std::fs::write(path("eval.jsonl"), "{}\n".repeat(1 << 20)).expect("written");
        let text = format!(
            "base_model = {:?}\noutput_dir = \"out\"\n[[datasets]]\npath = {:?}\n[eval]\npath = {:?}\n[training]\nmax_steps = 1\n",
            folder.path().display().to_string(),
            path("data.csv"),
            path("eval.jsonl")
        );
        let run = config::parse("the config", &text, &[]).expect("a config").run;
        assert_eq!(of_rows(&run), (2 << 20) * PER_ROW + 2 * PER_ROW + 5 * (4 + 3) * (1 << 20));
    }
}
