//! Model families: what a config says, which tensors there are, and the forward pass.
//!
//! `families/` has a file for each family, with all that is particular to it; `config/` is what
//! `config.json` says. `source.rs` is where weights come from: `weights.rs` a model folder with its
//! names (`names.rs`), what of it nothing reads (`unused.rs`, against `inventory.rs`) and quantised
//! matrices (`fp8.rs`, `gptq.rs`), `experts.rs` the experts of a layer in any layout.

// What is trained: `adapter.rs` says which modules get an adapter and `peft_rules.rs` which targets
// are refused, `adapter_config.rs` reads PEFT's config, `files.rs` says how trained tensors are
// written. `layer/` is the forward pass of each kind of layer, `build/` puts a model together.

pub mod adapter;
mod adapter_config;
pub mod build;
pub mod config;
pub mod experts;
pub mod families;
mod files;
pub mod fp8;
pub mod generate;
pub mod gptq;
pub mod inventory;
mod layer;
mod model;
pub mod names;
pub mod peft;
mod peft_rules;
pub mod source;
mod unused;
pub mod weights;

pub use adapter::{LoraConfig, Targets, Trained};
pub use build::{Built, build};
pub use config::Config;
pub use experts::{Experts, ExpertsShape, Projection};
pub use families::{Family, FamilySupport, families};
pub use generate::{Sampling, Session};
pub use gptq::{GptqForm, GptqScales, GptqWeight};
pub use inventory::Inventory;
pub use model::Model;
pub use source::{FloatFormat, RandomSource, Shapes, StoredTensor, Weight, WeightSource};
pub use weights::{Copied, Weights};

/// Why a model cannot be put together.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("{file}: {what}")]
    Config { file: String, what: String },
    #[error("tensor {name}: {what}")]
    Tensor { name: String, what: String },
    #[error(transparent)]
    File(#[from] isobit_proof::FileError),
    #[error("adapter: {0}")]
    Adapter(String),
}
