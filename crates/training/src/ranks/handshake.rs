//! Before the first step all ranks compare what they are about to do. A rank with another program,
//! arithmetic, config, data or base model is refused, and the message says what differs and where.

use super::{RankError, Team};
use crate::prepare::{Prepared, RunError};
use isobit_proof::Hash;
use isobit_proof::name::counted;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// The version of the messages between ranks.
const PROTOCOL: u32 = 1;

/// What a rank is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    pub program: String,
    pub build: Build,
    pub protocol: u32,
    pub numerics: String,
    /// Every key that must be the same on all ranks, with its value.
    pub keys: BTreeMap<String, String>,
    pub data: String,
    pub base: String,
}

/// The program's file. Machines of different kinds have different ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    architecture: String,
    /// Empty if the file cannot be read.
    digest: String,
}

impl Build {
    /// Of this process; read once.
    fn current() -> Self {
        static DIGEST: OnceLock<String> = OnceLock::new();
        let digest = || std::env::current_exe().ok().and_then(|path| Hash::of_file(&path).ok());
        let digest = DIGEST.get_or_init(|| digest().map_or(String::new(), |digest| digest.to_string())).clone();
        Self { architecture: std::env::consts::ARCH.to_string(), digest }
    }

    /// Whether the two are known to be different programs.
    fn differs(&self, other: &Self) -> bool {
        let is_known = !self.digest.is_empty() && !other.digest.is_empty();
        is_known && self.architecture == other.architecture && self.digest != other.digest
    }
}

impl Introduction {
    /// Of one of `size` ranks. Each computes whole groups, so there are at least as many of these.
    pub fn of(prepared: &Prepared, size: usize) -> Result<Self, RunError> {
        let groups = prepared.run.training.gradient_groups as usize;
        if size > groups {
            let (what, hint) = too_many(size, groups);
            return Err(RunError::Target { what, hint });
        }
        let mut keys = prepared.run.keys_of_ranks();
        keys.extend(prepared.identity.start.clone().map(|digest| ("adapter.resume_from".to_string(), digest)));
        Ok(Self {
            program: env!("CARGO_PKG_VERSION").to_string(),
            build: Build::current(),
            protocol: PROTOCOL,
            numerics: prepared.identity.numerics.clone(),
            keys,
            data: prepared.identity.data.clone(),
            base: prepared.identity.base.clone(),
        })
    }

    /// What differs first, most basic first.
    fn difference(&self, rank: usize, other: &Self) -> Option<RunError> {
        let refused = |what: String, hint: &'static str| Some(RunError::Refused { what, hint });
        let version =
            |of: &Self| format!("isobit {} (messages {}, arithmetic {})", of.program, of.protocol, of.numerics);
        if version(self) != version(other) {
            let what = format!("rank {rank} runs {}, rank 0 {}", version(other), version(self));
            return refused(what, "install the same program on every machine");
        }
        if self.build.differs(&other.build) {
            let what = format!("rank {rank} runs another build of isobit {} than rank 0", self.program);
            return refused(what, "install the same program on every machine");
        }
        let ours = self.keys.keys().chain(other.keys.keys());
        if let Some(key) = ours.into_iter().find(|key| self.keys.get(*key) != other.keys.get(*key)) {
            let value = |of: &Self| of.keys.get(key).map_or("not set".to_string(), |value| format!("set to {value}"));
            let what = format!("`{key}` is {} on rank {rank} and {} on rank 0", value(other), value(self));
            return refused(what, "give every rank the same config");
        }
        let differs = |what: &str, hint| {
            let what = format!("the {what} of rank {rank} differs from that of rank 0");
            Some(RunError::Differs { what, hint })
        };
        if self.data != other.data {
            return differs("data", "copy the same data files and tokenizer to every machine");
        }
        if self.base != other.base {
            return differs("base model", "copy the same model folder to every machine");
        }
        None
    }
}

/// Compares all ranks. `own` is a failure if this rank could not even prepare.
pub fn compare(team: &Team<'_>, own: Result<Introduction, RunError>) -> Result<(), RunError> {
    if team.is_alone() {
        return own.map(drop);
    }
    let answer = own.map(|own| serde_json::to_vec(&own).expect("strings and numbers have a JSON form"));
    team.agree(answer, |answers| {
        let mut read = Vec::new();
        for (rank, answer) in answers.iter().enumerate() {
            let introduction: Introduction =
                serde_json::from_slice(answer).map_err(|error| RankError::damaged(rank, error.to_string()))?;
            read.push(introduction);
        }
        let found = read.iter().enumerate().find_map(|(rank, other)| read[0].difference(rank, other));
        found.map_or(Ok(Vec::new()), Err)
    })?;
    Ok(())
}

/// What is wrong with more ranks than groups, and what to do.
pub fn too_many(ranks: usize, groups: usize) -> (String, String) {
    let what = format!("{ranks} ranks cannot share {}", counted(groups as u64, "gradient group"));
    let hint = format!(
        "at most {}, or set `gradient_groups = {ranks}` or more under [training]; the number of groups is \
         part of the arithmetic",
        counted(groups as u64, "rank")
    );
    (what, hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction(architecture: &str, digest: &str) -> Introduction {
        let (program, numerics, data, base) = ("1".to_string(), String::new(), String::new(), String::new());
        let build = Build { architecture: architecture.to_string(), digest: digest.to_string() };
        Introduction { program, build, protocol: PROTOCOL, numerics, keys: BTreeMap::new(), data, base }
    }

    #[test]
    fn another_build_of_the_same_version_is_refused() {
        let first = introduction("x86_64", "a");
        let refused = first.difference(2, &introduction("x86_64", "b")).expect("another build");
        assert!(refused.to_string().contains("rank 2 runs another build"), "{refused}");
        for same in [("x86_64", "a"), ("aarch64", "b"), ("x86_64", "")] {
            assert!(first.difference(2, &introduction(same.0, same.1)).is_none(), "{same:?}");
        }
        assert_eq!(Build::current().digest.len(), 64, "the program has read its file");
    }
}
