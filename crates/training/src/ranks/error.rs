//! Why ranks cannot go on together.

use isobit_proof::name::counted;
use serde::{Deserialize, Serialize};

/// A failure of one rank, as the others hear of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    pub rank: usize,
    pub code: u8,
    pub what: String,
    pub hint: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankError {
    #[error(
        "rank {rank} did not answer within {}: it hangs, is too slow, or its machine is lost",
        counted(*.seconds, "second")
    )]
    Silent { rank: usize, seconds: u64 },
    #[error("rank {rank} is gone: {why}")]
    Gone { rank: usize, why: String },
    #[error("a message from rank {rank} arrived damaged: {what}")]
    Damaged { rank: usize, what: String },
    #[error("after update {step} the weights of {} differ from those of rank {reference}", named(.ranks))]
    Weights {
        step: u64,
        ranks: Vec<usize>,
        reference: usize,
        /// Whether more than half of all ranks have the weights of `reference`.
        is_majority: bool,
    },
    /// All ranks know of this one; the rank itself reports it.
    #[error("rank {}: {}", .0.rank, .0.what)]
    Failed(RankFailure),
}

/// `rank 2`, or `ranks 2, 3`.
fn named(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

impl RankError {
    /// A message that is not what this rank must have sent.
    pub(super) fn damaged(rank: usize, what: impl Into<String>) -> Self {
        Self::Damaged { rank, what: what.into() }
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Silent { .. } | Self::Gone { .. } | Self::Damaged { .. } | Self::Weights { .. } => 6,
            Self::Failed(failure) => failure.code,
        }
    }

    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Silent { .. } => "look at that rank's machine; a larger `rank_timeout` waits longer, and \
                                    `--resume` continues from the last checkpoint"
                .to_string(),
            Self::Gone { .. } => "`--resume` continues from the last checkpoint, with any number of ranks".to_string(),
            Self::Damaged { .. } => {
                "check the network and memory of both machines, then continue with `--resume`".to_string()
            }
            Self::Weights { ranks, is_majority: true, .. } => {
                let (of, out) = if ranks.len() == 1 { ("that rank", "it") } else { ("each of these ranks", "them") };
                format!(
                    "the device or memory of {of} computes wrong results: run `isobit devices` there, leave {out} out, \
                     and continue with `--resume`"
                )
            }
            Self::Weights { .. } => "one of these ranks computes wrong results: run `isobit devices` on each, leave \
                                     out the one that fails, and continue with `--resume`"
                .to_string(),
            Self::Failed(failure) => return failure.hint.clone(),
        })
    }

    /// Whether messages can still be exchanged with every rank.
    pub fn leaves_all_reachable(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Weights { .. })
    }
}
