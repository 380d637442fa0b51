//! `docs/config.md`: every key of a config, from the table that the parser reads.

use super::{NOTICE, Table, code};
use isobit_training::config::{Fallback, KEYS, Key, Section, ValueKind};
use std::fmt::Write;

const OPENING: &str = "\
# Config

TOML. Unknown keys are errors. `--set training.learning_rate=1e-4` overrides a key on the command
line. Aliases are accepted; the resolved config, which is stored with the run, has the canonical
names. *Bits* says whether a key can influence weights, metrics or the choice of the best
checkpoint: two runs that differ only in the others give the same result, and a run may be resumed
with other values of them. Paths do not count: the contents of the files do. How an update is split
(`micro_batch_size` times `gradient_accumulation_steps`) does not count, only the product.
";

pub(super) fn page() -> String {
    let mut page = format!("{NOTICE}\n{OPENING}");
    for section in [Section::Top, Section::Datasets, Section::Eval, Section::Training, Section::Adapter] {
        let heading = match section {
            Section::Top => "Top of the file".to_string(),
            section => code(section.heading()),
        };
        write!(page, "\n## {heading}\n\n{}", table(section)).expect("writing to a string succeeds");
    }
    page
}

fn table(section: Section) -> String {
    let mut table = Table::new(&["key", "type", "default", "aliases", "bits", "meaning"]);
    for key in KEYS.iter().filter(|key| key.section == section) {
        let aliases: Vec<String> = key.aliases.iter().map(|alias| code(alias)).collect();
        table.row(&[
            code(key.name).as_str(),
            type_of(key.kind),
            &default(key),
            &aliases.join(", "),
            if key.influences { "yes" } else { "no" },
            key.help,
        ]);
    }
    table.0
}

fn type_of(kind: ValueKind) -> &'static str {
    match kind {
        ValueKind::Switch => "boolean",
        ValueKind::SwitchOrText => "boolean or string",
        ValueKind::Whole => "integer",
        ValueKind::Number => "number",
        ValueKind::CountOrShare => "count, or share below 1",
        ValueKind::Text => "string",
        ValueKind::Texts => "list of strings",
        ValueKind::TextOrTexts => "string or list of strings",
        ValueKind::Wholes => "list of integers",
        ValueKind::TableOfWholes => "table of integers",
        ValueKind::TableOfNumbers => "table of numbers",
        ValueKind::Counts => "table or list of integers",
        ValueKind::Table => "table",
    }
}

fn default(key: &Key) -> String {
    match key.default {
        Fallback::Required => "required".to_string(),
        Fallback::Depends(words) => words.to_string(),
        Fallback::Unset => String::new(),
        fixed => fixed.value().map_or(String::new(), |value| code(&value.to_string())),
    }
}
