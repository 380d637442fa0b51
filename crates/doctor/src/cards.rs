//! Cards that are known by name, for plans of machines that are not at hand: `cards.toml` says what
//! memory each has and where that is known from.

use isobit_kernels::gpu::Api;
use serde::Deserialize;
use std::sync::OnceLock;

/// The data file.
const CARDS: &str = include_str!("cards.toml");

/// Parts of a product name that say nothing, also within a word: "NVIDIA GeForce RTX4090", "MI50
/// 32GB".
const EMPTY_PARTS: [&str; 9] = ["nvidia", "geforce", "rtx", "tesla", "amd", "instinct", "radeon", "gib", "gb"];
/// Whole words that say nothing, or begin so: "A100-SXM4-80GB", "H100 80GB HBM3", "MI300X OAM".
const EMPTY_WORDS: [&str; 3] = ["gpu", "oam", "accelerator"];
const EMPTY_BEGINNINGS: [&str; 3] = ["sxm", "hbm", "pcie"];

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

/// Cards whose names begin like what somebody typed.
pub fn cards_like(text: &str) -> Vec<&'static NamedCard> {
    let typed = plain(text);
    let begins = |card: &&NamedCard| plain(&card.name).starts_with(&typed);
    named_cards().iter().filter(begins).filter(|_| typed.len() >= 2).collect()
}

/// Letters and digits without the words that say nothing.
fn plain(text: &str) -> String {
    let text = text.to_ascii_lowercase();
    let words = text.split(|c: char| !c.is_ascii_alphanumeric());
    let says_something = |word: &&str| {
        !EMPTY_WORDS.contains(word) && !EMPTY_BEGINNINGS.iter().any(|beginning| word.starts_with(beginning))
    };
    let kept: String = words.filter(says_something).collect();
    EMPTY_PARTS.iter().fold(kept, |text, part| text.replace(part, ""))
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
        assert_eq!([name("MI-50"), name("mi50 32gb")], [Some("mi50"), Some("mi50-32")]);
        // As drivers spell them.
        for (text, meant) in [
            ("NVIDIA A100-SXM4-80GB", "a100-80"),
            ("NVIDIA A100-PCIE-40GB", "a100"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100"),
            ("NVIDIA H100 NVL", "h100-nvl"),
            ("Tesla V100-SXM2-32GB", "v100-32"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
            ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
            ("AMD Instinct MI300X OAM", "mi300x"),
            ("AMD Radeon Pro VII", "radeonvii"),
        ] {
            assert_eq!(name(text), Some(meant), "{text}");
        }
        for text in
            ["", "rtx", "cpu", "cuda:0", "abacus", "MI50 64", "NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA H200 NVL"]
        {
            assert_eq!(name(text), None, "{text}");
        }
    }

    #[test]
    fn the_beginning_of_a_name_finds_its_cards() {
        let names = |text: &str| cards_like(text).into_iter().map(|card| card.name.as_str()).collect::<Vec<_>>();
        assert_eq!(names("MI300"), ["mi300x"]);
        assert_eq!(names("rtx 409"), ["rtx4090"]);
        assert_eq!(names("RTX 2080"), ["rtx2080ti"]);
        for text in ["", "rtx", "7", "abacus"] {
            assert_eq!(names(text), [""; 0], "{text}");
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
