//! The rules of `rules.toml`, applied to the facts. A rule is data: conditions, and what to tell
//! somebody whose machine meets them. A new rule needs no code unless it asks something new.

use crate::amd::{Card, Link};
use crate::facts::{AccessProblem, Facts};
use crate::version::Version;
use isobit_kernels::gpu::hip::{APPENDING_VARIABLES, HIDING_VARIABLES, architecture_of_version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// The data file.
pub const RULES: &str = include_str!("rules.toml");

const OVERRIDE: &str = "HSA_OVERRIDE_GFX_VERSION";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// A device that is present fails.
    Error,
    /// Something will not work, or not as expected.
    #[default]
    Warning,
    /// Worth knowing.
    Note,
}

/// What was found, why it matters, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub id: String,
    pub level: Level,
    pub what: String,
    pub why: String,
    pub remedy: String,
    /// Where this is known from; empty for what was measured here.
    pub source: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    rule: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    id: String,
    #[serde(default)]
    level: Level,
    what: String,
    why: String,
    remedy: String,
    source: Vec<String>,
    when: Conditions,
}

/// All that are given must hold. Conditions on a card select cards: one card must meet all of them.
#[expect(clippy::struct_excessive_bools, reason = "each is a condition of its own in the data file")]
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
struct Conditions {
    /// Architectures of a card; `*` stands for the rest of a name.
    gfx: Vec<String>,
    /// Architectures that the card must not have.
    gfx_not: Vec<String>,
    /// Threads of a card's wavefront.
    wavefront: Option<u64>,
    /// Fewer PCI Express lanes than the card has.
    link_narrow: bool,
    /// A partition mode other than SPX.
    divided: bool,
    /// The override names another architecture than the card's.
    override_mismatch: bool,
    /// Architectures of another card.
    beside: Vec<String>,
    /// Cards with the architectures of `gfx`.
    cards_min: usize,
    /// Cards of different architectures.
    unlike: bool,
    /// Demands on ROCm's version, and that of Python.
    rocm: Vec<String>,
    python: Vec<String>,
    /// The interpreter of the Python environment is missing.
    python_broken: bool,
    /// Packages, with demands on their versions.
    packages: BTreeMap<String, Vec<String>>,
    /// Demands on the ROCm that torch was built for.
    torch_rocm: Vec<String>,
    /// What torch was not built for.
    torch_not_for: Option<String>,
    /// Variables of which one is set.
    variables: Vec<String>,
    /// A variable that hides cards is set.
    hides: bool,
    /// A variable that adds options to those of AMD's compiler is set.
    appends: bool,
    /// Words of which the kernel's command line has none.
    command_line_lacks: Vec<String>,
    no_nvidia: bool,
    /// A display device of AMD's, but no driver for computing.
    amd_without_kfd: bool,
    /// Device files that cannot be opened.
    no_access: bool,
}

impl Conditions {
    fn selects_cards(&self) -> bool {
        !self.gfx.is_empty()
            || !self.gfx_not.is_empty()
            || self.wavefront.is_some()
            || self.link_narrow
            || self.divided
            || self.override_mismatch
    }

    fn card(&self, card: &Card, facts: &Facts) -> bool {
        (self.gfx.is_empty() || matches_any(&self.gfx, &card.architecture))
            && !matches_any(&self.gfx_not, &card.architecture)
            && self.wavefront.is_none_or(|width| card.wavefront == Some(width))
            && (!self.link_narrow || card.link.as_ref().is_some_and(Link::is_narrow))
            && (!self.divided || card.partition.as_deref().is_some_and(|mode| mode != "SPX"))
            && (!self.override_mismatch || overridden(facts).is_some_and(|claimed| claimed != card.architecture))
    }

    /// The cards that are meant, if everything holds.
    fn hold<'a>(&self, facts: &'a Facts) -> Option<Vec<&'a Card>> {
        let cards: Vec<&Card> = facts.cards.iter().filter(|card| self.card(card, facts)).collect();
        let on_cards = (!self.selects_cards() || !cards.is_empty())
            && cards.len() >= self.cards_min
            && (self.beside.is_empty() || facts.cards.iter().any(|card| matches_any(&self.beside, &card.architecture)))
            && (!self.unlike || facts.cards.windows(2).any(|pair| pair[0].architecture != pair[1].architecture));
        let set = |name: &str| facts.variables.get(name).is_some_and(|value| !value.is_empty());
        let on_system = (self.rocm.is_empty() || satisfies(facts.rocm.as_deref(), &self.rocm))
            && (self.variables.is_empty() || self.variables.iter().any(|name| set(name)))
            && (!self.hides || HIDING_VARIABLES.iter().any(|name| facts.variables.contains_key(*name)))
            && (!self.appends || APPENDING_VARIABLES.iter().any(|name| set(name)))
            && (self.command_line_lacks.is_empty()
                || !facts.command_line.iter().any(|word| self.command_line_lacks.contains(word)))
            && (!self.no_nvidia || facts.nvidia.is_none())
            && (!self.amd_without_kfd || (!facts.kfd && !facts.displays.is_empty()))
            && (!self.no_access || facts.access_problem.is_some());
        (on_cards && on_system && self.holds_for_python(facts)).then_some(cards)
    }

    fn holds_for_python(&self, facts: &Facts) -> bool {
        let asks = !self.python.is_empty() || self.python_broken || !self.packages.is_empty();
        let Some(python) = &facts.python else { return !asks };
        let version = |name: &str| python.packages.get(name).map(String::as_str);
        let local = version("torch").and_then(Version::parse).map(|version| version.local).unwrap_or_default();
        let built_for = Version::after(&local, "rocm");
        (self.python.is_empty() || satisfies(python.version.as_deref(), &self.python))
            && (!self.python_broken || python.problem.is_some())
            && self.packages.iter().all(|(name, demands)| satisfies(version(name), demands))
            && (self.torch_rocm.is_empty() || built_for.is_some_and(|rocm| rocm.satisfies_all(&self.torch_rocm)))
            && self.torch_not_for.as_deref().is_none_or(|kind| !local.starts_with(kind))
    }
}

fn satisfies(version: Option<&str>, demands: &[String]) -> bool {
    version.and_then(Version::parse).is_some_and(|version| version.satisfies_all(demands))
}

fn matches_any(patterns: &[String], name: &str) -> bool {
    patterns.iter().any(|pattern| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    })
}

/// The architecture that the override claims; a text that is no version claims something else than
/// any card is.
fn overridden(facts: &Facts) -> Option<String> {
    let value = facts.variables.get(OVERRIDE).filter(|value| !value.is_empty())?;
    Some(architecture_of_version(value).unwrap_or_else(|| value.clone()))
}

fn rules() -> &'static [Rule] {
    static RULES_READ: OnceLock<Vec<Rule>> = OnceLock::new();
    RULES_READ.get_or_init(|| {
        let file: RuleFile = toml::from_str(RULES).expect("the rules are part of the program, and a test reads them");
        file.rule
    })
}

/// The names of all rules.
pub fn rule_ids() -> Vec<String> {
    rules().iter().map(|rule| rule.id.clone()).collect()
}

/// What the rules say about a machine, the gravest first.
pub fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found: Vec<Finding> = rules()
        .iter()
        .filter_map(|rule| {
            let cards = rule.when.hold(facts)?;
            let filled = |text: &str| fill(text, facts, &rule.when, &cards);
            Some(Finding {
                what: filled(&rule.what),
                why: filled(&rule.why),
                remedy: filled(&rule.remedy),
                id: rule.id.clone(),
                level: rule.level,
                source: rule.source.clone(),
            })
        })
        .collect();
    found.sort_by_key(|finding| finding.level);
    found
}

/// Puts facts in the places of a text.
fn fill(text: &str, facts: &Facts, when: &Conditions, cards: &[&Card]) -> String {
    // Cards that no condition selects are all meant.
    let all: Vec<&Card> = facts.cards.iter().collect();
    let cards = if when.selects_cards() { cards } else { &all };
    let is_set = |name: &&str| facts.variables.get(*name).is_some_and(|value| !value.is_empty());
    let appending = APPENDING_VARIABLES.into_iter().filter(|_| when.appends);
    let variable = when.variables.iter().map(String::as_str).chain(appending).find(is_set).unwrap_or(OVERRIDE);
    let hidden = HIDING_VARIABLES.iter().filter_map(|name| Some(format!("{name}={}", facts.variables.get(*name)?)));
    let access = |part: fn(&AccessProblem) -> &String| {
        facts.access_problem.as_ref().map_or(String::new(), |problem| part(problem).clone())
    };
    let mut values = BTreeMap::from([
        ("card", named(cards)),
        ("cards", cards.len().to_string()),
        ("rocm", facts.rocm.clone().unwrap_or_default()),
        ("variable", variable.to_string()),
        ("value", facts.variables.get(variable).cloned().unwrap_or_default()),
        ("displays", facts.displays.join(", ")),
        ("access", access(|problem| &problem.what)),
        ("access_remedy", access(|problem| &problem.remedy)),
        ("hidden", hidden.collect::<Vec<_>>().join(", ")),
    ]);
    if let Some(python) = &facts.python {
        values.insert("python", python.version.clone().unwrap_or_default());
        values.insert("python_folder", python.folder.clone());
        values.insert("python_problem", python.problem.clone().unwrap_or_default());
        for name in when.packages.keys() {
            values.insert(name, python.packages.get(name).cloned().unwrap_or_default());
        }
    }
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        let (name, behind) = after.split_once('}').unwrap_or((after, ""));
        out.push_str(before);
        out.push_str(values.get(name).map_or("", String::as_str));
        rest = behind;
    }
    out + rest
}

/// `gfx906 (0000:03:00.0)`, or how many of a kind there are.
fn named(cards: &[&Card]) -> String {
    let mut kinds: Vec<(&str, Vec<&str>)> = Vec::new();
    for card in cards {
        match kinds.iter_mut().find(|(kind, _)| *kind == card.architecture) {
            Some((_, addresses)) => addresses.push(&card.pci),
            None => kinds.push((&card.architecture, vec![&card.pci])),
        }
    }
    let one = |(kind, addresses): &(&str, Vec<&str>)| match addresses[..] {
        [address] => format!("{kind} ({address})"),
        _ => format!("{} × {kind}", addresses.len()),
    };
    kinds.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mistake in the data file must not reach a user.
    #[test]
    fn every_rule_is_whole() {
        let rules = rules();
        let mut ids: Vec<&str> = rules.iter().map(|rule| rule.id.as_str()).collect();
        ids.sort_unstable();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "{ids:?}");
        for rule in rules {
            assert_ne!(rule.when, Conditions::default(), "{} has no condition", rule.id);
            assert!(!rule.source.is_empty() && !rule.source.iter().any(String::is_empty), "{} has no source", rule.id);
            let Conditions { rocm, python, packages, torch_rocm, .. } = &rule.when;
            for demand in [rocm, python, torch_rocm].into_iter().chain(packages.values()).flatten() {
                assert!(Version::parse("1").and_then(|one| one.satisfies(demand)).is_some(), "{}: {demand}", rule.id);
            }
            let known = [
                "card",
                "cards",
                "rocm",
                "variable",
                "value",
                "displays",
                "access",
                "access_remedy",
                "hidden",
                "python",
                "python_folder",
                "python_problem",
            ];
            for text in [&rule.what, &rule.why, &rule.remedy] {
                assert!(!text.is_empty() && !text.ends_with('.'), "{}: {text}", rule.id);
                for name in text.split('{').skip(1).filter_map(|rest| rest.split('}').next()) {
                    assert!(known.contains(&name) || packages.contains_key(name), "{}: {{{name}}}", rule.id);
                }
            }
        }
    }
}
