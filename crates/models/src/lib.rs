//! Model families: configs, tensors and the forward pass.
//!
//! `families/` has one file per family, with everything specific to it; `config/` reads
//! `config.json`. `source.rs` is where weights come from: `weights.rs` is a model folder with its
//! names (`names.rs`), unused tensors (`unused.rs`, against `inventory.rs`) and quantised matrices
//! (`fp8.rs`, `gptq.rs`, `awq.rs`, `nf4.rs`, `int4.rs`, `mxfp4.rs`); `experts.rs` reads the experts
//! of a layer in any layout; `gguf/` has llama.cpp's names.

// What is trained: `adapter.rs` selects the modules that get an adapter, `peft_rules.rs` refuses
// some targets, `adapter_config.rs` reads PEFT's config, and `files.rs` defines how trained tensors
// are stored; `merge/` adds an adapter to the weights. `layer/` is the forward pass of each kind of
// layer; `build/` assembles a model.

pub mod adapter;
mod adapter_config;
mod awq;
pub mod build;
pub mod config;
mod config_shapes;
pub mod experts;
pub mod families;
mod files;
pub mod fp8;
pub mod generate;
pub mod gguf;
pub mod gptq;
pub mod int4;
pub mod inventory;
mod layer;
pub mod merge;
mod model;
mod mxfp4;
pub mod names;
mod nf4;
pub mod peft;
mod peft_rules;
pub mod source;
mod unused;
pub mod weights;

pub use adapter::{LoraConfig, Targets, Trained};
pub use build::{Built, build, build_part, build_placed, build_whole};
pub use config::Config;
pub use config_shapes::ConfigShapes;
pub use experts::{Experts, ExpertsShape, Mxfp4Experts, Projection};
pub use families::{Family, FamilySupport, families};
pub use files::TrainedTensor;
pub use generate::{Sampling, Session, cache_bytes};
pub use gguf::{GgufModel, GgufSource, GgufTensor, GgufValue};
pub use gptq::{GptqForm, GptqScales, GptqWeight};
pub use inventory::Inventory;
pub use merge::{LowRankFactors, Merged, MergedKind, MergedTensor, quantised_count};
pub use model::{Model, Part};
pub use source::{FloatFormat, RandomSource, Shapes, StoredTensor, Weight, WeightSource};
pub use weights::{Copied, Weights};

/// Why a model cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("{file}: {what}")]
    Config { file: String, what: String },
    /// A `model_type` that no family has.
    #[error("{file}: {what}")]
    Family { file: String, what: String },
    #[error("tensor {name}: {what}")]
    Tensor { name: String, what: String },
    /// A tensor of a quantised base, which cannot be trained itself.
    #[error("tensor {name}: it is quantised: only adapters can be trained")]
    Quantised { name: String },
    #[error(transparent)]
    File(#[from] isobit_proof::FileError),
    #[error("adapter: {0}")]
    Adapter(String),
    /// A rank that is not computed here.
    #[error("adapter: {0}")]
    Rank(String),
    /// A model or an adapter that llama.cpp would compute differently, or not at all.
    #[error("{0}")]
    Gguf(String),
}

impl ModelError {
    /// What is wrong with a tensor, whose name may be untrusted.
    pub(crate) fn tensor(name: &str, what: impl Into<String>) -> Self {
        Self::Tensor { name: isobit_proof::name::harmless(name, 200), what: what.into() }
    }
}
