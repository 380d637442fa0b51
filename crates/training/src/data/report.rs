//! The data report: counts, lengths, and every row that was truncated or dropped, by file and line.
//! `isobit data check` prints it, and it is part of a run's receipt.

use super::error::Untrainable;
use super::format::RowFormat;
use serde::Serialize;
use std::path::PathBuf;

/// Where an example came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RowSource {
    /// Index into the list of files.
    pub file: usize,
    /// Counted from 1.
    pub line: usize,
}

/// What the loss counts in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossTokens {
    Assistant,
    Completion,
    /// According to the labels and masks of the rows.
    Labels,
    All,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileReport {
    pub path: PathBuf,
    pub bytes: u64,
    pub blake3: String,
    pub format: RowFormat,
    pub loss: LossTokens,
    /// Examples in the file, dropped ones included.
    pub examples: usize,
    /// Tokens trained on or conditioned on, after truncation and without dropped examples.
    pub tokens: u64,
    pub trainable_tokens: u64,
}

/// An example longer than `max_seq_length`, which was truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Truncated {
    pub source: RowSource,
    /// Tokens before truncation.
    pub tokens: usize,
}

/// A dropped example: it has no token to train on, or the config excludes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Dropped {
    pub source: RowSource,
    pub reason: Untrainable,
}

/// A row that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Bad {
    pub source: RowSource,
    /// What rows with the same error have in common.
    pub reason: &'static str,
    pub message: String,
    /// One thing to try.
    pub hint: String,
}

/// Number of examples whose length is in `from..=to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bucket {
    pub from: usize,
    pub to: usize,
    pub count: usize,
}

/// Lengths of examples in tokens, before truncation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lengths {
    pub shortest: usize,
    pub median: usize,
    pub longest: usize,
    pub histogram: Vec<Bucket>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    pub files: Vec<FileReport>,
    pub max_seq_length: usize,
    pub sample_packing: bool,
    pub examples: usize,
    pub rows: usize,
    pub tokens: u64,
    pub trainable_tokens: u64,
    /// Examples in which the end of the prompt and the start of the completion share a token, which
    /// is trained on.
    pub boundary_merged: usize,
    pub truncated: Vec<Truncated>,
    pub dropped: Vec<Dropped>,
    /// Rows that cannot be read, in the order of files and lines: `data check` continues after
    /// them, training does not.
    pub bad: Vec<Bad>,
    pub lengths: Lengths,
    /// Digest of the rows: [`crate::row::digest`].
    pub digest: String,
}

impl Lengths {
    pub(super) fn new(mut lengths: Vec<usize>) -> Self {
        lengths.sort_unstable();
        let (Some(&shortest), Some(&longest)) = (lengths.first(), lengths.last()) else { return Self::default() };
        let mut histogram = Vec::new();
        let (mut from, mut to, mut done) = (0, 16, 0);
        while done < lengths.len() {
            let below = lengths.partition_point(|length| *length <= to);
            if below > done || done > 0 {
                histogram.push(Bucket { from, to, count: below - done });
            }
            done = below;
            (from, to) = (to + 1, to.saturating_mul(2));
        }
        // The lower of the two middle ones, so that it is a length that occurs.
        Self { shortest, median: lengths[(lengths.len() - 1) / 2], longest, histogram }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_counted_in_powers_of_two() {
        let lengths = Lengths::new(vec![40, 17, 300, 33, 32]);
        assert_eq!((lengths.shortest, lengths.median, lengths.longest), (17, 33, 300));
        let counts: Vec<_> = lengths.histogram.iter().map(|bucket| (bucket.from, bucket.to, bucket.count)).collect();
        assert_eq!(counts, [(17, 32, 2), (33, 64, 2), (65, 128, 0), (129, 256, 0), (257, 512, 1)]);
        assert_eq!(Lengths::new(vec![]), Lengths::default());
    }
}
