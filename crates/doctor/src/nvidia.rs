//! NVIDIA's driver and cards, from the files its kernel module keeps.

use crate::tree::Tree;
use serde::Serialize;

const FOLDER: &str = "/proc/driver/nvidia";
/// BOUND: cards that are looked at.
const CARDS_MAX: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Nvidia {
    pub driver: String,
    /// Models, with their PCI addresses.
    pub cards: Vec<(String, String)>,
}

/// None without the driver.
pub(crate) fn nvidia(tree: &Tree) -> Option<Nvidia> {
    let version = tree.line(format!("{FOLDER}/version"))?;
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    let driver = version.split_whitespace().find(is_version).unwrap_or("unknown").to_string();
    let cards = tree.names(format!("{FOLDER}/gpus")).into_iter().take(CARDS_MAX).map(|pci| {
        let text = tree.text(format!("{FOLDER}/gpus/{pci}/information")).unwrap_or_default();
        let model = text.lines().find_map(|line| line.strip_prefix("Model:")).unwrap_or("unknown model");
        (model.trim().chars().take(80).collect(), pci)
    });
    Some(Nvidia { driver, cards: cards.collect() })
}
