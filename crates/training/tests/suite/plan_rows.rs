//! A plan counts micro-batches whose rows all have the maximum length. Rows of text have any
//! length, and micro-batches of different sizes follow each other: none of that may need more.

use crate::short_runs::step_settings;
use isobit_autograd::Policy;
use isobit_kernels::gpu::{Api, Selector};
use isobit_kernels::plan::{Counting, MemoryLayout, SMALL_STEP_BYTES};
use isobit_kernels::{Cpu, Gpu, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Config, ConfigShapes, LoraConfig, Trained, build};
use isobit_numerics::slices::Profile;
use isobit_training::engine::Engine;
use isobit_training::plan::{SHORT, longest_rows, of_short_documents, short_row};
use isobit_training::row::Row;
use isobit_training::trainer::Trainer;

/// Rows of a micro-batch, and their tokens at most.
const ROWS: usize = 4;
const TOKENS: usize = 256;

/// Width of the narrow models.
const HIDDEN: usize = 64;

/// Narrow models, with vocabularies as large as those of published ones: logits of the head are the
/// largest workspace.
const MODELS: [(&str, &str, bool); 5] = [
    ("49k", DENSE, false),
    ("49k in 4 bits", DENSE, true),
    (
        "152k",
        r#"{"model_type":"qwen2","hidden_size":64,"intermediate_size":160,"num_hidden_layers":2,"num_attention_heads":4,
        "num_key_value_heads":2,"vocab_size":151936,"rope_theta":1000000.0,"tie_word_embeddings":true}"#,
        false,
    ),
    (
        "experts",
        r#"{"model_type":"qwen3_moe","hidden_size":64,"intermediate_size":96,"moe_intermediate_size":64,
        "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"num_experts":8,
        "num_experts_per_tok":2,"vocab_size":32768,"norm_topk_prob":true,"tie_word_embeddings":false}"#,
        false,
    ),
    (
        "hybrid",
        r#"{"model_type":"qwen3_5_text","hidden_size":64,"intermediate_size":96,"num_hidden_layers":4,
        "num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"linear_num_key_heads":2,
        "linear_num_value_heads":4,"linear_key_head_dim":16,"linear_value_head_dim":16,"vocab_size":32768,
        "tie_word_embeddings":false}"#,
        false,
    ),
];
const DENSE: &str = r#"{"model_type":"llama","hidden_size":64,"intermediate_size":160,"num_hidden_layers":2,
    "num_attention_heads":4,"num_key_value_heads":2,"vocab_size":49152,"rope_theta":10000.0,"tie_word_embeddings":true}"#;

/// Bytes of buffers at the peak, and with the gaps between them where those are known.
fn peak<L: MemoryLayout>(
    like: L,
    (text, in_4bit): (&str, bool),
    trained: &Trained,
    policy: Policy,
    batches: &[Vec<Row>],
) -> [usize; 2] {
    let config = Config::parse(text).expect("a config");
    let source = ConfigShapes::new(&config).and_then(|shapes| shapes.load_in_4bit(in_4bit)).expect("shapes");
    let settings = Settings { trained: trained.clone(), profile: Profile::X2, positions: TOKENS, seed: 0 };
    let counting = Counting::new(like);
    let built = build(&counting, &config, &source, &settings).expect("a model");
    let mut trainer = Trainer::new(counting.clone(), built);
    let step = step_settings(Profile::X2, policy, ROWS);
    for (number, rows) in batches.iter().enumerate() {
        let rows: Vec<&Row> = rows.iter().collect();
        trainer.step(&rows, number as u64 + 1, 0.0, &step).expect("a step");
    }
    let bytes = counting.bytes_peak();
    [bytes, counting.heap_bytes().unwrap_or(bytes)]
}

/// Updates of two micro-batches of all lengths: growing, shrinking and mixed.
fn of_text() -> Vec<Vec<Row>> {
    let growing = [2, 3, 17, 31, 64, 100, 127, 128, 129, 165, 200, 255, TOKENS];
    let lengths = growing.into_iter().chain(growing.into_iter().rev());
    let mut updates: Vec<Vec<usize>> = lengths.map(|length| vec![length; 2 * ROWS]).collect();
    updates.extend((0..24_usize).map(|update| {
        let length = |row: usize| 2 + (update * 131 + row * 89 + update * row * 37) % (TOKENS - 1);
        (0..2 * ROWS).map(|row| if (row + update) % 3 == 0 { TOKENS } else { length(row) }).collect()
    }));
    let row = |length: usize| longest_rows(1, length).remove(0);
    updates.into_iter().map(|lengths| lengths.into_iter().map(row).collect()).collect()
}

/// Rows of the maximum length that hold several documents.
fn packed() -> Vec<Vec<Row>> {
    let row = |document: usize| {
        let starts = (0..TOKENS).step_by(document).chain([TOKENS]).collect();
        Row::new(vec![0; TOKENS], vec![true; TOKENS], starts)
    };
    [TOKENS, 2, 7, 33, 64, 65, 129].map(|document| vec![row(document); 2 * ROWS]).to_vec()
}

#[test]
fn rows_of_any_length_need_no_more_than_the_longest() {
    let longest = vec![longest_rows(2 * ROWS, TOKENS); 2];
    let shortest: Vec<Vec<Row>> = vec![vec![of_short_documents(TOKENS); 2 * ROWS]];
    // As a plan does it: on a card, gaps and small buffers are those of shorter rows, too; small
    // ones may need a step more.
    let short = SHORT.map(|part| longest_rows(2 * ROWS, short_row(TOKENS, HIDDEN * ROWS, part)));
    let longest = [&longest[..], &short].concat();
    let planned_packed = [longest.clone(), shortest].concat();
    let lora = Trained::Lora(LoraConfig::new(8, 16.0, &["q_proj", "v_proj", "o_proj", "in_proj_qkv", "down_proj"]));
    let mut failed = Vec::new();
    for (name, model, in_4bit) in MODELS {
        for trained in [lora.clone(), Trained::Full].into_iter().filter(|trained| !in_4bit || *trained == lora) {
            let kind = if trained == lora { "LoRA" } else { "full" };
            for policy in Policy::ALL {
                let mut compare = |device: &str, of: &dyn Fn(&[Vec<Row>]) -> [usize; 2]| {
                    for (what, planned, taken) in
                        [("of text", &longest, of_text()), ("packed", &planned_packed, packed())]
                    {
                        let [planned, taken] = [of(planned), of(&taken)];
                        if taken[0] > planned[0] || taken[1] > planned[1] + SMALL_STEP_BYTES {
                            let case = format!("{name}, {kind}, {}, {device}, rows {what}", policy.name());
                            failed.push(format!("{case}: {taken:?} bytes, {planned:?} planned"));
                        }
                    }
                };
                for threads in [1, 3] {
                    let cpu = || Cpu::new(threads, CpuPath::Scalar).expect("always there");
                    compare("cpu", &|rows| peak(cpu(), (model, in_4bit), &trained, policy, rows));
                }
                for (api, architecture) in [(Api::Cuda, Some((8, 6))), (Api::Cuda, Some((9, 0))), (Api::Hip, None)] {
                    let gpu = || Gpu::absent(Selector { api, index: 0 }, architecture);
                    compare(api.name(), &|rows| peak(gpu(), (model, in_4bit), &trained, policy, rows));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Wide models, whose gaps on a card are large if there are any: hidden width, config.
const WIDE: [(usize, &str); 4] = [
    (
        896,
        r#"{"model_type":"qwen2","hidden_size":896,"intermediate_size":4864,"num_hidden_layers":8,
        "num_attention_heads":14,"num_key_value_heads":2,"vocab_size":151936,"rope_theta":1000000.0,
        "tie_word_embeddings":true}"#,
    ),
    (
        576,
        r#"{"model_type":"llama","hidden_size":576,"intermediate_size":1536,"num_hidden_layers":30,
        "num_attention_heads":9,"num_key_value_heads":3,"vocab_size":49152,"rope_theta":100000.0,
        "tie_word_embeddings":true}"#,
    ),
    (
        512,
        r#"{"model_type":"qwen3_moe","hidden_size":512,"intermediate_size":1024,"moe_intermediate_size":256,
        "num_hidden_layers":8,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":64,"num_experts":32,
        "num_experts_per_tok":4,"vocab_size":32768,"norm_topk_prob":true,"tie_word_embeddings":false}"#,
    ),
    (
        512,
        r#"{"model_type":"qwen3_5_text","hidden_size":512,"intermediate_size":1536,"num_hidden_layers":8,
        "num_attention_heads":4,"num_key_value_heads":2,"head_dim":128,"linear_num_key_heads":4,
        "linear_num_value_heads":8,"linear_key_head_dim":128,"linear_value_head_dim":128,"vocab_size":32768,
        "tie_word_embeddings":false}"#,
    ),
];

/// A plan counts the gaps between buffers, too, of rows of any length; and what it counts for rows
/// that are shorter adds little to what the longest need.
#[test]
fn gaps_between_buffers_are_those_of_the_plan() {
    let modules = ["q_proj", "k_proj", "v_proj", "in_proj_qkv", "gate_proj", "down_proj"];
    let dense = Trained::Lora(LoraConfig::new(8, 16.0, &modules));
    let attention = Trained::Lora(LoraConfig::new(8, 16.0, &modules[..3]));
    let mut failed = Vec::new();
    for (hidden, text) in WIDE {
        for policy in Policy::ALL {
            let lora = if text.contains("moe") { &attention } else { &dense };
            for trained in [lora, &Trained::Full] {
                let of = |rows: &[Vec<Row>]| {
                    let gpu = Gpu::absent(Selector { api: Api::Cuda, index: 0 }, Some((9, 0)));
                    peak(gpu, (text, false), trained, policy, rows)[1]
                };
                // As a plan does it.
                let longest = longest_rows(2 * ROWS, TOKENS);
                let short = SHORT.map(|part| longest_rows(2 * ROWS, short_row(TOKENS, hidden * ROWS, part)));
                let planned = of(&[&[longest.clone(), longest.clone()][..], &short].concat());
                let (taken, fixed) = (of(&of_text()), of(&[longest.clone(), longest]));
                if taken > planned || planned > fixed + fixed / 33 {
                    let case = format!("{hidden} wide, {}, full {}", policy.name(), *trained == Trained::Full);
                    failed.push(format!("{case}: {taken} taken, {planned} planned, {fixed} for the longest rows"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
