//! Cards that are known by name, for plans of machines that are not at hand: `cards.toml` says what
//! memory each has and where that is known from.

use isobit_kernels::gpu::Api;
use serde::Deserialize;
use std::sync::OnceLock;

/// The data file.
const CARDS: &str = include_str!("cards.toml");

/// Words of a product name that say nothing: "NVIDIA GeForce RTX 4090", "MI50 32GB".
const EMPTY_WORDS: [&str; 9] = ["nvidia", "geforce", "rtx", "tesla", "amd", "instinct", "radeon", "gib", "gb"];

/// What NVIDIA's driver keeps of the memory that its tools report: half a GiB and a two-hundredth.
/// Programs see 14.56 GiB of a T4's 15.00, 79.15 of an A100's 80.00 and 178.35 of a B200's 179.06.
const KEPT_BY_DRIVER: u64 = 1 << 29;
const KEPT_SHARE: u64 = 200;

/// A card by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedCard {
    /// `mi50-32`
    pub name: String,
    /// `AMD Instinct MI50, 32 GB`
    pub title: String,
    /// Other names.
    pub also: Vec<String>,
    pub api: Api,
    /// Compute capability of an NVIDIA card.
    pub compute: Option<(u32, u32)>,
    /// Bytes that programs can have.
    pub memory: u64,
    /// Whether plans were compared with the driver's figure on such a card.
    pub measured: bool,
    /// Where the figure is known from.
    pub source: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CardFile {
    card: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    title: String,
    #[serde(default)]
    also: Vec<String>,
    api: String,
    compute: Option<(u32, u32)>,
    memory_mib: u64,
    #[serde(default)]
    measured: bool,
    source: Vec<String>,
}

impl NamedCard {
    fn of(entry: Entry) -> Self {
        let Entry { name, title, also, api, compute, memory_mib, measured, source } = entry;
        let api = Api::ALL.into_iter().find(|known| known.name() == api).expect("an interface of the program");
        let reported = memory_mib << 20;
        let memory = if api == Api::Cuda { reported - KEPT_BY_DRIVER - reported / KEPT_SHARE } else { reported };
        Self { name, title, also, api, compute, memory, measured, source }
    }
}

/// All of them, in the order of the file.
pub fn named_cards() -> &'static [NamedCard] {
    static READ: OnceLock<Vec<NamedCard>> = OnceLock::new();
    READ.get_or_init(|| {
        let file: CardFile = toml::from_str(CARDS).expect("the cards are part of the program, and a test reads them");
        file.card.into_iter().map(NamedCard::of).collect()
    })
}

/// The card that somebody means by `RTX 4090`, `mi50-32` or `AMD Instinct MI50 32GB`.
pub fn named_card(text: &str) -> Option<&'static NamedCard> {
    let wanted = plain(text);
    let is_meant = |card: &&NamedCard| std::iter::once(&card.name).chain(&card.also).any(|name| plain(name) == wanted);
    named_cards().iter().find(is_meant).filter(|_| !wanted.is_empty())
}

/// Letters and digits without the words that say nothing.
fn plain(text: &str) -> String {
    let kept: String = text.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    EMPTY_WORDS.iter().fold(kept, |text, word| text.replace(word, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_has_one_name_a_size_and_a_source() {
        let mut names: Vec<String> = Vec::new();
        for card in named_cards() {
            names.extend(std::iter::once(&card.name).chain(&card.also).map(|name| plain(name)));
            assert!(card.memory > 7 << 30 && card.memory < 512 << 30, "{}", card.name);
            assert!(!card.source.is_empty() && card.source.iter().all(|source| !source.is_empty()), "{}", card.name);
            assert_eq!(card.compute.is_some(), card.api == Api::Cuda, "{}", card.name);
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a name stands for one card");
    }

    #[test]
    fn names_as_people_write_them() {
        let name = |text: &str| named_card(text).map(|card| card.name.as_str());
        for text in ["RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "rtx_4090"] {
            assert_eq!(name(text), Some("rtx4090"), "{text}");
        }
        assert_eq!(name("AMD Instinct MI50 32GB"), Some("mi50-32"));
        assert_eq!([name("MI50"), name("mi50-16"), name("MI50 16 GB")], [Some("mi50"); 3]);
        assert_eq!([name("A100 80GB"), name("a100")], [Some("a100-80"), Some("a100")]);
        for text in ["", "rtx", "cpu", "cuda:0", "abacus", "MI50 64"] {
            assert_eq!(name(text), None, "{text}");
        }
    }

    #[test]
    fn a_program_gets_less_than_the_tools_report() {
        for (name, seen) in [("t4", 14.56), ("a100-80", 79.15), ("b200", 178.35)] {
            let memory = named_card(name).expect("listed").memory as f64 / f64::from(1 << 30);
            assert!(memory < seen && memory > seen - 1.0, "{name}: {memory}");
        }
        assert_eq!(named_card("mi300x").expect("listed").memory, 206_141_652_992);
    }
}
