//! Arguments of a chore: `--name value`, `--flag` and plain words, taken one by one; anything left
//! over is an error.

use std::fmt::Display;
use std::str::FromStr;

pub(crate) struct Arguments(Vec<String>);

impl Arguments {
    pub(crate) fn new(words: impl Iterator<Item = String>) -> Self {
        Self(words.collect())
    }

    pub(crate) fn flag(&mut self, name: &str) -> bool {
        let at = self.0.iter().position(|word| word == name);
        at.map(|at| self.0.remove(at)).is_some()
    }

    pub(crate) fn option(&mut self, name: &str) -> Result<Option<String>, String> {
        let Some(at) = self.0.iter().position(|word| word == name) else { return Ok(None) };
        if at + 1 == self.0.len() {
            return Err(format!("{name} needs a value"));
        }
        self.0.remove(at);
        Ok(Some(self.0.remove(at)))
    }

    pub(crate) fn parsed<T: FromStr<Err: Display>>(&mut self, name: &str) -> Result<Option<T>, String> {
        let Some(text) = self.option(name)? else { return Ok(None) };
        text.parse().map(Some).map_err(|error| format!("{name} {text}: {error}"))
    }

    pub(crate) fn number(&mut self, name: &str, default: usize) -> Result<usize, String> {
        Ok(self.parsed(name)?.unwrap_or(default))
    }

    /// The next plain word.
    pub(crate) fn word(&mut self, what: &str) -> Result<String, String> {
        match self.0.first() {
            Some(word) if !word.starts_with("--") => Ok(self.0.remove(0)),
            _ => Err(format!("{what} is missing")),
        }
    }

    /// Everything left.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        std::mem::take(&mut self.0)
    }

    pub(crate) fn finish(&self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("unknown argument `{}`", self.0.join(" "))) }
    }
}
