//! Memory beside the buffers that a plan counts: of the process on the host, of the driver on a
//! card. These are upper estimates from measurements; `cargo xtask plan-table` repeats them
//! (docs/memory.md).

use isobit_kernels::gpu::Api;
use isobit_training::config::Run;
use isobit_training::plan::{Item, MemoryPlan};
use std::path::Path;

/// The process itself, its threads, and pages that its allocator keeps.
const PROCESS: u64 = 18 << 20;
const PER_THREAD: u64 = 1 << 20;
/// Bytes of a tokenizer in memory for each byte of `tokenizer.json`. It is dropped before weights
/// are loaded.
const PER_TOKENIZER_BYTE: u64 = 10;
/// Bytes of rows for each byte of a data file: five for a token, and a token is three bytes of text
/// or more, unless the vocabulary has little more than single bytes.
const PER_DATA_BYTE: u64 = 2;
const PER_DATA_BYTE_OF_BYTES: u64 = 6;
const VOCABULARY_OF_BYTES: usize = 4096;

/// Address space that the allocator reserves for a thread, and a thread for its stack; and what the
/// allocator asks for in addition while it makes such a reservation.
const RESERVED_PER_THREAD: u64 = 72 << 20;
const RESERVED_MEANWHILE: u64 = 128 << 20;

/// A CUDA context with the modules of a run, and tables that a plan does not count.
const CUDA_CONTEXT: u64 = 552 << 20;
/// Other drivers were never measured. Buffers that come and go in a step leave gaps: one byte for so
/// many.
const OTHER_CONTEXT: u64 = 512 << 20;
const OTHER_GAPS: u64 = 8;

/// Host memory of a run on the CPU beside the `counted` bytes of its buffers.
pub(crate) fn of_process(run: &Run, vocabulary: usize, threads: usize, counted: u64) -> u64 {
    let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |about| about.len());
    let data: u64 = run.datasets.iter().fold(0, |sum, path| sum.saturating_add(bytes(path)));
    let each = if vocabulary < VOCABULARY_OF_BYTES { PER_DATA_BYTE_OF_BYTES } else { PER_DATA_BYTE };
    let process = PROCESS.saturating_add(PER_THREAD.saturating_mul(threads as u64));
    let process = process.saturating_add(data.saturating_mul(each));
    let tokenizer = bytes(&run.base_model.join("tokenizer.json")).saturating_mul(PER_TOKENIZER_BYTE);
    process.saturating_add(tokenizer.saturating_sub(counted))
}

/// Address space of a run on the CPU that is not memory in use: mapped weights, and what the
/// allocator reserves for threads.
pub(crate) fn of_address_space(run: &Run, threads: usize) -> u64 {
    let files = std::fs::read_dir(&run.base_model).into_iter().flatten().flatten();
    let weights = files.filter(|file| file.path().extension().is_some_and(|ending| ending == "safetensors"));
    let weights = weights.filter_map(|file| std::fs::metadata(file.path()).ok()).map(|about| about.len());
    let threads = threads as u64 + u64::from(run.data_workers);
    let reserved = threads.saturating_mul(RESERVED_PER_THREAD).saturating_add(RESERVED_MEANWHILE);
    weights.fold(reserved, u64::saturating_add)
}

/// Memory of a card beside the buffers of a plan.
pub(crate) fn of_driver(api: Api, plan: &MemoryPlan) -> u64 {
    let moving = plan.items[&Item::Activations] + plan.items[&Item::Workspace];
    let gaps = plan.heap_bytes.map(|bytes| bytes.saturating_sub(plan.bytes_peak) as u64);
    match api {
        Api::Cuda => CUDA_CONTEXT + gaps.unwrap_or(0),
        Api::Hip | Api::OpenCl => OTHER_CONTEXT + moving as u64 / OTHER_GAPS,
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
        std::fs::write(path("data.jsonl"), vec![b' '; 1 << 20]).expect("written");
        let text = format!(
            "base_model = {:?}\noutput_dir = \"out\"\n[[datasets]]\npath = {:?}\n[training]\nmax_steps = 1\n",
            folder.path().display().to_string(),
            path("data.jsonl")
        );
        let run = config::parse("the config", &text, &[]).expect("a config").run;
        let of = |vocabulary, threads, counted| of_process(&run, vocabulary, threads, counted) >> 20;
        assert_eq!(of(50_000, 2, 1 << 30), 18 + 2 + 2);
        assert_eq!(of(50_000, 2, 10 << 20), 18 + 2 + 2 + 20);
        assert_eq!(of(256, 2, 1 << 30), 18 + 2 + 6);
    }
}
