//! The runs of the table. Rows, or most of those that are text, have the maximum length, as a plan
//! assumes.

use super::model::{self, Model};
use std::fmt::Write;
use std::path::Path;

pub(super) struct Configuration {
    pub(super) title: &'static str,
    pub(super) model: Model,
    /// Rows computed at once, and their tokens; an update has two such micro-batches.
    rows: usize,
    tokens: usize,
    checkpointing: &'static str,
    /// Lines of `[adapter]`.
    adapter: &'static str,
    /// Other lines of the config, before its sections.
    top: &'static str,
    /// Rows that are evaluated at once.
    evaluated: usize,
    /// Whether rows are text, of several lengths, for a tokenizer as large as published ones.
    is_text: bool,
    pub(super) ranks: usize,
    /// Groups of an update, with ranks as many as its micro-batches.
    groups: usize,
}

const LORA: &str = "type = \"lora\"\nlora_r = 8\nlora_alpha = 16\nlora_target_modules = \"all-linear\"";
const ATTENTION: &str = "type = \"lora\"\nlora_r = 8\nlora_alpha = 16\nlora_target_modules = [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]";
const FULL: &str = "type = \"full\"";
const LAST: &str = "type = \"last_blocks\"\nlast_blocks = 2";

const fn run(
    title: &'static str,
    model: Model,
    rows: usize,
    tokens: usize,
    checkpointing: &'static str,
    adapter: &'static str,
) -> Configuration {
    let (top, evaluated, is_text) = ("", 0, false);
    Configuration { title, model, rows, tokens, checkpointing, adapter, top, evaluated, is_text, ranks: 1, groups: 1 }
}

/// On several ranks, a row of each group.
const fn shared(
    title: &'static str,
    model: Model,
    adapter: &'static str,
    ranks: usize,
    groups: usize,
) -> Configuration {
    Configuration { ranks, groups, ..run(title, model, 1, 256, "full", adapter) }
}

pub(super) const ON_CPU: [Configuration; 13] = [
    run("135M, LoRA, 2×256, full recomputation", model::M135, 2, 256, "full", LORA),
    run("135M, LoRA, 2×512, selective", model::M135, 2, 512, "selective", LORA),
    run("135M, LoRA, 2×512, none", model::M135, 2, 512, "none", LORA),
    Configuration {
        evaluated: 16,
        ..run("135M, LoRA, 1×256, full, 16 rows evaluated at once", model::M135, 1, 256, "full", ATTENTION)
    },
    Configuration {
        top: "profile = \"x3\"\n",
        ..run("135M, LoRA, 1×512, full, x3", model::M135, 1, 512, "full", LORA)
    },
    run("135M, full fine-tune, 1×256, full", model::M135, 1, 256, "full", FULL),
    Configuration {
        evaluated: 4,
        ..run("135M, full fine-tune, 1×256, full, evaluated before it saves", model::M135, 1, 256, "full", FULL)
    },
    run("135M, last 2 blocks, 2×256, none", model::M135, 2, 256, "none", LAST),
    run("0.5B, LoRA, 1×256, full", model::B05, 1, 256, "full", LORA),
    run("experts (moe-small), LoRA, 2×256, full", model::EXPERTS, 2, 256, "full", ATTENTION),
    run("hybrid (hybrid-small), LoRA, 2×256, selective", model::HYBRID, 2, 256, "selective", LORA),
    Configuration { is_text: true, ..run("135M, LoRA, 4×256, full, rows of text", model::M135, 4, 256, "full", LORA) },
    Configuration {
        is_text: true,
        top: "load_in_4bit = true\n",
        ..run("135M, LoRA, 4×256, full, rows of text, `load_in_4bit`", model::M135, 4, 256, "full", LORA)
    },
];

pub(super) const ON_RANKS: [Configuration; 11] = [
    shared("52M, LoRA, 2 ranks, 4 groups", model::M52, LORA, 2, 4),
    shared("52M, LoRA, 4 ranks, 4 groups", model::M52, LORA, 4, 4),
    shared("52M, last 2 blocks, 2 ranks, 4 groups", model::M52, LAST, 2, 4),
    shared("52M, full fine-tune, 2 ranks, 2 groups", model::M52, FULL, 2, 2),
    shared("52M, full fine-tune, 2 ranks, 4 groups", model::M52, FULL, 2, 4),
    shared("52M, full fine-tune, 2 ranks, 5 groups", model::M52, FULL, 2, 5),
    shared("52M, full fine-tune, 3 ranks, 4 groups", model::M52, FULL, 3, 4),
    shared("52M, full fine-tune, 4 ranks, 4 groups", model::M52, FULL, 4, 4),
    shared("52M, full fine-tune, 4 ranks, 8 groups", model::M52, FULL, 4, 8),
    shared("61M, table not tied, full fine-tune, 2 ranks, 8 groups", model::M61, FULL, 2, 8),
    shared("61M, table not tied, full fine-tune, 4 ranks, 4 groups", model::M61, FULL, 4, 4),
];

pub(super) const ON_CARD: [Configuration; 12] = [
    run("0.5B, LoRA, 8×512, full recomputation", model::B05, 8, 512, "full", LORA),
    run("0.5B, LoRA, 8×512, selective", model::B05, 8, 512, "selective", LORA),
    run("0.5B, LoRA, 8×512, none", model::B05, 8, 512, "none", LORA),
    run("0.5B, full fine-tune, 4×1024, full", model::B05, 4, 1024, "full", FULL),
    run("1.5B, LoRA, 8×1024, full", model::B15, 8, 1024, "full", LORA),
    run("1.5B, LoRA, 4×1024, none", model::B15, 4, 1024, "none", LORA),
    run("135M, full fine-tune, 8×1024, full", model::M135, 8, 1024, "full", FULL),
    Configuration {
        top: "offload = [\"optimizer\", \"activations\"]\n",
        ..run(
            "135M, full fine-tune, 8×1024, full, optimizer and activations offloaded",
            model::M135,
            8,
            1024,
            "full",
            FULL,
        )
    },
    run("experts (moe-small), LoRA, 8×1024, full", model::EXPERTS, 8, 1024, "full", ATTENTION),
    run("hybrid (hybrid-small), LoRA, 4×1024, selective", model::HYBRID, 4, 1024, "selective", LORA),
    Configuration { is_text: true, ..run("0.5B, LoRA, 8×512, full, rows of text", model::B05, 8, 512, "full", LORA) },
    Configuration {
        is_text: true,
        ..run("135M, full fine-tune, 8×1024, full, rows of text", model::M135, 8, 1024, "full", FULL)
    },
];

/// Updates, and micro-batches of each in a single process.
const STEPS: usize = 2;
const MICRO_BATCHES: usize = 2;
/// The next token's distance in the vocabulary: the rows of ranks touch pages all over a table, as
/// text does.
const STRIDE: usize = 7;
const STRIDE_OF_RANKS: usize = 7919;

impl Configuration {
    pub(super) fn toml(&self, device: &str) -> String {
        let Self { model, rows, tokens, checkpointing, adapter, top, evaluated, groups, .. } = self;
        let eval = match evaluated {
            0 => String::new(),
            rows => format!("[eval]\npath = \"rows.jsonl\"\neval_steps = 1\nmicro_batch_size = {rows}\n"),
        };
        // As many everywhere: each has stacks and workspaces of its own.
        let threads = if *adapter == FULL && self.ranks == 1 { 2 } else { 1 };
        let micro_batches = self.micro_batches();
        format!(
            "base_model = \"{}\"\noutput_dir = \"run\"\nseed = 1\ndevice = \"{device}\"\nthreads = {threads}\n{top}\n[[datasets]]\n\
             path = \"rows.jsonl\"\n\n{eval}\n[training]\nmax_seq_length = {tokens}\nmicro_batch_size = {rows}\n\
             gradient_accumulation_steps = {micro_batches}\ngradient_groups = {groups}\nmax_steps = {STEPS}\nlearning_rate = 1e-4\n\
             gradient_checkpointing = \"{checkpointing}\"\nsave_steps = 1\n\n[adapter]\n{adapter}\n",
            model.name
        )
    }

    /// Writes the rows, and the tokenizer of the model's folder if they are text.
    pub(super) fn write_data(&self, folder: &Path) -> Result<(), String> {
        let of_model = folder.join(self.model.name);
        let tokenizer = of_model.join(model::TOKENIZER);
        if self.is_text {
            model::write_tokenizer(&of_model, self.model.vocabulary)?;
        } else if tokenizer.exists() {
            std::fs::remove_file(&tokenizer).map_err(|error| format!("{}: {error}", tokenizer.display()))?;
        }
        let path = folder.join("rows.jsonl");
        let rows = if self.is_text { self.rows_of_text() } else { self.rows_of_tokens() };
        std::fs::write(&path, rows).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn count(&self) -> usize {
        (STEPS * self.micro_batches() * self.rows).max(self.evaluated)
    }

    /// The rank that comes last to every exchange, as a plan assumes of the one that needs the
    /// most: the first, which adds up most, or the one with the most groups.
    pub(super) fn late_rank(&self) -> usize {
        if self.groups.is_multiple_of(self.ranks) { 0 } else { self.ranks - 1 }
    }

    fn micro_batches(&self) -> usize {
        if self.ranks > 1 { self.groups } else { MICRO_BATCHES }
    }

    /// Rows are cut at the maximum length, but fewer than there are micro-batches are short, so
    /// that one has long rows alone, as a plan assumes. A token is two letters, some are more.
    fn rows_of_text(&self) -> String {
        let mut text = String::new();
        for row in 0..self.count() {
            let is_long = row % (self.rows + 1) < self.rows;
            let letters = if is_long { 4 * self.tokens } else { self.tokens * (row % 4 + 1) / 6 };
            let letters =
                (0..letters).map(|at| if at % 7 == 6 { ' ' } else { char::from(b'a' + ((at * 5 + row) % 26) as u8) });
            let _ = writeln!(text, "{{\"text\":\"{}\"}}", letters.collect::<String>());
        }
        text
    }

    /// Rows of the maximum length.
    fn rows_of_tokens(&self) -> String {
        let stride = if self.ranks > 1 { STRIDE_OF_RANKS } else { STRIDE };
        let mut text = String::new();
        for row in 0..self.count() {
            let tokens = (0..self.tokens).map(|at| ((at * stride + row * 131) % self.model.vocabulary).to_string());
            let list = tokens.collect::<Vec<_>>().join(",");
            let _ = writeln!(text, "{{\"input_ids\":[{list}],\"labels\":[{list}]}}");
        }
        text
    }
}
