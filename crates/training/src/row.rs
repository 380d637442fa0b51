//! A training row: tokens, which of them the loss counts, and the documents they belong to.
//!
//! One type serves from tokenising to the batch. It also enforces a rule that would be easy to
//! duplicate: nothing predicts the first token of a document, so that token is never a target.

use crate::data::RowSource;
use isobit_proof::Hash;

/// Concatenated documents of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    tokens: Vec<u32>,
    targets: Vec<bool>,
    document_starts: Vec<usize>,
    sources: Vec<RowSource>,
}

impl Row {
    /// Token `t` counts in the loss if `targets[t]`, unless it is the first of a document.
    /// `document_starts` holds the start of each document: 0 first, the number of tokens last.
    pub fn new(mut tokens: Vec<u32>, mut targets: Vec<bool>, document_starts: Vec<usize>) -> Self {
        assert_eq!(tokens.len(), targets.len(), "every token is a target or not");
        assert_eq!(document_starts.first(), Some(&0), "the first document starts the row");
        assert_eq!(document_starts.last(), Some(&tokens.len()), "the last document ends the row");
        // Nothing comes before the first token of a document, so nothing predicts it.
        for start in &document_starts {
            if let Some(first) = targets.get_mut(*start) {
                *first = false;
            }
        }
        // Rows stay in memory as long as the run.
        tokens.shrink_to_fit();
        targets.shrink_to_fit();
        Self { tokens, targets, document_starts, sources: Vec::new() }
    }

    /// A single document.
    pub fn document(tokens: Vec<u32>, targets: Vec<bool>) -> Self {
        let document_starts = vec![0, tokens.len()];
        Self::new(tokens, targets, document_starts)
    }

    /// The same, with the source that all of its documents come from.
    #[must_use]
    pub(crate) fn with_source(self, source: RowSource) -> Self {
        let sources = vec![source; self.document_starts.len() - 1];
        Self { sources, ..self }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// `targets()[t]`: token `t` is predicted from those before it in its document, and the loss
    /// counts it.
    pub fn targets(&self) -> &[bool] {
        &self.targets
    }

    /// The start of each document: 0 first, the number of tokens last.
    pub fn document_starts(&self) -> &[usize] {
        &self.document_starts
    }

    /// The source of each document; empty for a row that is not from a file.
    pub fn sources(&self) -> &[RowSource] {
        &self.sources
    }

    /// Number of tokens that the loss counts.
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|target| **target).count()
    }

    /// Excludes the first `count` tokens from the loss.
    pub(crate) fn ignore_first(&mut self, count: usize) {
        self.targets[..count].fill(false);
    }

    /// Truncates the row to `length` tokens.
    pub(crate) fn truncate(&mut self, length: usize) {
        if length < self.tokens.len() {
            self.tokens.truncate(length);
            self.targets.truncate(length);
            self.document_starts.retain(|start| *start < length);
            self.document_starts.push(length);
            self.sources.truncate(self.document_starts.len() - 1);
            self.tokens.shrink_to_fit();
            self.targets.shrink_to_fit();
        }
    }

    /// Appends the documents of another row.
    pub(crate) fn append(&mut self, other: Self) {
        let first = self.tokens.len();
        self.tokens.reserve_exact(other.tokens.len());
        self.targets.reserve_exact(other.targets.len());
        self.tokens.extend(other.tokens);
        self.targets.extend(other.targets);
        self.document_starts.extend(other.document_starts[1..].iter().map(|start| first + start));
        self.sources.extend(other.sources);
    }
}

/// BLAKE3 of everything training sees of the rows: tokens, targets and documents, in order. It
/// identifies the data of a run in its checkpoints. The source of a row is not part of it.
pub fn digest<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Hash {
    let mut hasher = blake3::Hasher::new();
    for row in rows {
        hasher.update(&(row.tokens.len() as u64).to_le_bytes());
        hasher.update(&row.tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>());
        hasher.update(&row.targets.iter().map(|target| u8::from(*target)).collect::<Vec<u8>>());
        // The last start is the number of tokens, so the list needs no length prefix.
        for start in &row.document_starts {
            hasher.update(&(*start as u64).to_le_bytes());
        }
    }
    Hash(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed() -> Row {
        Row::new(vec![7, 8, 9, 10, 11], vec![true; 5], vec![0, 3, 5])
    }

    #[test]
    fn the_first_token_of_a_document_is_no_target() {
        assert_eq!(packed().targets(), [false, true, true, false, true]);
        assert_eq!(packed().target_count(), 3);
        assert_eq!(Row::document(vec![], vec![]).target_count(), 0);
    }

    #[test]
    fn rows_are_cut_and_put_together_by_documents() {
        let mut row = packed();
        row.truncate(5);
        assert_eq!(row, packed());
        row.truncate(4);
        assert_eq!(row, Row::new(vec![7, 8, 9, 10], vec![true; 4], vec![0, 3, 4]));
        row.truncate(3);
        assert_eq!(row, Row::document(vec![7, 8, 9], vec![true; 3]));
        let source = |line| RowSource { file: 0, line };
        let mut row = row.with_source(source(1));
        row.append(Row::document(vec![10, 11], vec![true; 2]).with_source(source(4)));
        assert_eq!(row.sources(), [source(1), source(4)]);
        assert_eq!(Row { sources: Vec::new(), ..row }, packed());
    }

    /// Checkpoints hold this digest: it must not change.
    #[test]
    fn the_digest_is_that_of_earlier_versions() {
        let mut bytes = Vec::new();
        bytes.extend(5_u64.to_le_bytes());
        bytes.extend([7_u32, 8, 9, 10, 11].into_iter().flat_map(u32::to_le_bytes));
        bytes.extend([0, 1, 1, 0, 1]);
        bytes.extend([0_u64, 3, 5].into_iter().flat_map(u64::to_le_bytes));
        assert_eq!(digest([&packed()]), Hash::of_bytes(&bytes));
        assert_eq!(digest([]), Hash::of_bytes(&[]));
    }

    #[test]
    fn everything_training_sees_is_in_the_digest() {
        let of = |row: Row| digest([&row]);
        let row = || Row::new(vec![1, 2, 3], vec![false, true, true], vec![0, 3]);
        assert_ne!(of(row()), of(Row::new(vec![1, 2, 4], vec![false, true, true], vec![0, 3])));
        assert_ne!(of(row()), of(Row::new(vec![1, 2, 3], vec![false, false, true], vec![0, 3])));
        assert_ne!(of(row()), of(Row::new(vec![1, 2, 3], vec![false, true, false], vec![0, 2, 3])));
        assert_ne!(of(row()), digest([&row(), &row()]));
        assert_eq!(of(row()), of(row().with_source(RowSource { file: 3, line: 9 })));
    }
}
