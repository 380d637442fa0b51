//! Versions of programs: `2.5.1+rocm6.2`, and what a rule asks of them: `>=6.4`.

use std::cmp::Ordering;

/// The numbers before anything else, and what follows a `+`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    numbers: Vec<u64>,
    pub(crate) local: String,
}

impl Version {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (release, local) = text.trim().split_once('+').unwrap_or((text.trim(), ""));
        let mut numbers = Vec::new();
        for part in release.split(['.', '-', '_']) {
            let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
            let Ok(number) = digits.parse() else { break };
            numbers.push(number);
            if digits.len() < part.len() {
                // `0rc1` ends the release.
                break;
            }
        }
        (!numbers.is_empty()).then(|| Self { numbers, local: local.to_string() })
    }

    /// The version behind a name: that of ROCm in `rocm6.2`.
    pub(crate) fn after(text: &str, name: &str) -> Option<Self> {
        Self::parse(text.strip_prefix(name)?)
    }

    fn compare(&self, other: &Self) -> Ordering {
        let longest = self.numbers.len().max(other.numbers.len());
        let number = |version: &Self, index: usize| version.numbers.get(index).copied().unwrap_or(0);
        (0..longest)
            .map(|index| number(self, index).cmp(&number(other, index)))
            .find(|order| order.is_ne())
            .unwrap_or(Ordering::Equal)
    }

    /// Whether it is what a rule asks for: `>=6.4`, `<2.6`, `==2.5.1`; None for a text that is no
    /// such demand.
    pub(crate) fn satisfies(&self, demand: &str) -> Option<bool> {
        let at = demand.find(|c: char| c.is_ascii_digit())?;
        let order = self.compare(&Self::parse(&demand[at..])?);
        Some(match &demand[..at] {
            ">=" => order.is_ge(),
            "<" => order.is_lt(),
            "==" => order.is_eq(),
            _ => return None,
        })
    }

    /// Whether it is all that a rule asks for.
    pub(crate) fn satisfies_all(&self, demands: &[String]) -> bool {
        demands.iter().all(|demand| self.satisfies(demand) == Some(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        let is = |version: &str, demand: &str| Version::parse(version).and_then(|version| version.satisfies(demand));
        for (version, demand) in [
            ("6.10", ">=6.4"),
            ("6.4.0-47", ">=6.4"),
            ("6.3.4", "<6.4"),
            ("2.5.1+rocm6.2", "==2.5.1"),
            ("2.6.0rc1", ">=2.6"),
            ("3.13.0b2", ">=3.13"),
            ("7", "==7.0.0"),
        ] {
            assert_eq!(is(version, demand), Some(true), "{version} {demand}");
        }
        assert_eq!(is("2.5.1", "<2.5.1"), Some(false));
        assert_eq!(is("2.5.1", "~=2.5"), None);
        assert_eq!(Version::parse("nightly"), None);
        assert_eq!(Version::parse("2.7.0+rocm6.3").map(|version| version.local).as_deref(), Some("rocm6.3"));
        assert!(Version::after("rocm6.4", "rocm").is_some_and(|version| version.satisfies(">=6.4") == Some(true)));
        assert_eq!(Version::after("cu124", "rocm"), None);
    }
}
