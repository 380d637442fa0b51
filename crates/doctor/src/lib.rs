//! What a machine has, read from files the system keeps anyway: no library of a driver is loaded,
//! and nothing is linked. `facts.rs` collects it, one file per source; `rules.toml` lists the
//! combinations that are known not to work, and `rules.rs` applies it; `cards.toml` has the memory
//! of cards by name, for plans; `text.rs` says it all in words.
//!
//! Every file is read below a root, so that tests can give a recorded machine. Files may be
//! missing, huge or nonsense: then a fact is unknown, and nothing fails.
#![expect(clippy::float_arithmetic, reason = "sizes are printed")]

mod amd;
mod cards;
mod facts;
mod nvidia;
mod python;
mod rules;
mod system;
mod text;
mod tree;
mod version;

pub use amd::{Card, Link};
pub use cards::{NamedCard, cards_like, named_card, named_cards};
pub use facts::{Facts, Sources, VARIABLES};
pub use nvidia::Nvidia;
pub use python::Python;
pub use rules::{Finding, Level, RULES, findings, rule_ids};
pub use text::{COLUMN, facts_text, findings_text};
pub use tree::Tree;
