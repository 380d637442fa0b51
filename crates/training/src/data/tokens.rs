//! Rows that are already tokenised: `input_ids`, and optionally `labels`, `attention_mask`,
//! `completion_mask` and `assistant_masks` as other tools write them. Nothing is added; padding at
//! both ends is removed. `position_ids` and `seq_lengths` give the starts of packed documents, and
//! are refused if they mean anything else.

use super::conversation::{field, missing};
use super::error::RowError;
use super::example::Loss;
use super::json::Json;
use crate::row::Row;

/// The label of a token that the loss does not count.
const NO_LABEL: i64 = -100;

/// A row of tokens; all lists have the length of `ids`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tokens {
    ids: Vec<u32>,
    /// Whether the label equals the token.
    labelled: Vec<bool>,
    completion: Option<Vec<bool>>,
    assistant: Option<Vec<bool>>,
    /// Starts of further documents, after the first at 0.
    later_starts: Vec<usize>,
}

impl Tokens {
    pub(super) fn parse(row: &Json) -> Result<Self, RowError> {
        let ids = numbers(row, "input_ids")?.ok_or_else(|| missing("input_ids", "a list of token ids"))?;
        let ids = ids.into_iter().enumerate().map(|(index, id)| {
            u32::try_from(id).map_err(|_| RowError::Id { field: format!("input_ids[{index}]"), id, limit: None })
        });
        let ids = ids.collect::<Result<Vec<u32>, RowError>>()?;
        let labels =
            same_length(row, "labels", ids.len())?.unwrap_or_else(|| ids.iter().map(|id| i64::from(*id)).collect());
        for (index, (label, id)) in labels.iter().zip(&ids).enumerate() {
            if *label != NO_LABEL && *label != i64::from(*id) {
                return Err(RowError::Label { index, label: *label, id: *id });
            }
        }
        let mut tokens = Self {
            labelled: labels.into_iter().map(|label| label != NO_LABEL).collect(),
            completion: mask(row, "completion_mask", ids.len())?,
            assistant: mask(row, "assistant_masks", ids.len())?,
            later_starts: Vec::new(),
            ids,
        };
        let length = tokens.ids.len();
        let kept = match mask(row, "attention_mask", length)? {
            Some(attention) => text_of(&attention)?,
            None => 0..length,
        };
        tokens.keep(kept.clone());
        tokens.later_starts = later_starts(row, length, kept)?;
        Ok(tokens)
    }

    fn keep(&mut self, range: std::ops::Range<usize>) {
        let cut = |list: &mut Vec<bool>| *list = list[range.clone()].to_vec();
        cut(&mut self.labelled);
        self.completion.iter_mut().for_each(cut);
        self.assistant.iter_mut().for_each(cut);
        self.ids = self.ids[range.clone()].to_vec();
    }

    /// The row with its targets: labelled tokens inside the masks that the config selects. Ids must
    /// be below `limit`.
    pub(super) fn row(&self, limit: u32, loss: Loss) -> Result<Row, RowError> {
        if let Some((index, id)) = self.ids.iter().enumerate().find(|(_, id)| **id >= limit) {
            let field = format!("input_ids[{index}]");
            return Err(RowError::Id { field, id: i64::from(*id), limit: Some(limit) });
        }
        let inside = |mask: &Option<Vec<bool>>, asked: bool, index: usize| {
            mask.as_ref().is_none_or(|mask| !asked || mask[index])
        };
        let target = |index: usize| {
            self.labelled[index]
                && inside(&self.completion, loss.completion_only, index)
                && inside(&self.assistant, loss.assistant_only, index)
        };
        let targets = (0..self.ids.len()).map(target).collect();
        let later = self.later_starts.iter().copied();
        let document_starts = [0].into_iter().chain(later).chain([self.ids.len()]).collect();
        Ok(Row::new(self.ids.clone(), targets, document_starts))
    }
}

/// The tokens between padding at the start and at the end.
fn text_of(attention: &[bool]) -> Result<std::ops::Range<usize>, RowError> {
    let start = attention.iter().position(|seen| *seen).unwrap_or(attention.len());
    let end = attention.iter().rposition(|seen| *seen).map_or(start, |last| last + 1);
    match attention[start..end].iter().position(|seen| !*seen) {
        None => Ok(start..end),
        Some(gap) => {
            let (field, found) = (format!("attention_mask[{}]", start + gap), "0 between tokens that are seen".into());
            Err(RowError::Field { field, want: "0 only at the ends, for padding", found })
        }
    }
}

/// Starts of documents after the first, from `position_ids` and `seq_lengths`; both must agree.
fn later_starts(row: &Json, length: usize, kept: std::ops::Range<usize>) -> Result<Vec<usize>, RowError> {
    let by_position = match same_length(row, "position_ids", length)? {
        Some(positions) => Some(restarts(&positions[kept.clone()], kept.start)?),
        None => None,
    };
    let by_length = match numbers(row, "seq_lengths")? {
        Some(lengths) => Some(sums(&lengths, kept.len())?),
        None => None,
    };
    match (by_position, by_length) {
        (Some(positions), Some(lengths)) if positions != lengths => {
            let (field, found) = ("seq_lengths".into(), "another list".into());
            Err(RowError::Field { field, want: "the lengths that position_ids shows", found })
        }
        (positions, lengths) => Ok(positions.or(lengths).unwrap_or_default()),
    }
}

/// Positions must count from 0 in every document; nothing else can be trained on.
fn restarts(positions: &[i64], first: usize) -> Result<Vec<usize>, RowError> {
    let mut starts = Vec::new();
    let mut next = 0;
    for (index, position) in positions.iter().enumerate() {
        if *position == 0 && index > 0 {
            starts.push(index);
        } else if *position != next {
            let want =
                if index == 0 { "0 at the first token" } else { "one more than before, or 0 for a new document" };
            let (field, found) = (format!("position_ids[{}]", first + index), position.to_string());
            return Err(RowError::Field { field, want, found });
        }
        next = position + 1;
    }
    Ok(starts)
}

/// Lengths of documents that together make up the row.
fn sums(lengths: &[i64], total: usize) -> Result<Vec<usize>, RowError> {
    let refused = |field: String, want, found| Err(RowError::Field { field, want, found });
    let mut ends = Vec::with_capacity(lengths.len());
    let mut sum = 0usize;
    for (index, length) in lengths.iter().enumerate() {
        match usize::try_from(*length) {
            Ok(length) if length > 0 && length <= total - sum => sum += length,
            Ok(length) if length > 0 => break,
            _ => return refused(format!("seq_lengths[{index}]"), "above 0", length.to_string()),
        }
        ends.push(sum);
    }
    if sum != total || ends.len() != lengths.len() {
        let found = format!("{} lengths that do not sum to {total} tokens", lengths.len());
        return refused("seq_lengths".into(), "the lengths of the documents in the row", found);
    }
    ends.pop();
    Ok(ends)
}

/// A list of whole numbers; None if absent or null.
fn numbers(row: &Json, name: &str) -> Result<Option<Vec<i64>>, RowError> {
    let items = match row.get(name) {
        None | Some(Json::Null) => return Ok(None),
        Some(Json::Array(items)) => items,
        Some(other) => return Err(field(name, "a list of whole numbers", other)),
    };
    let whole = |(index, item): (usize, &Json)| match item {
        Json::Signed(number) => Ok(*number),
        Json::Unsigned(number) => Ok(i64::try_from(*number).unwrap_or(i64::MAX)),
        other => Err(field(format!("{name}[{index}]"), "a whole number", other)),
    };
    items.iter().enumerate().map(whole).collect::<Result<_, _>>().map(Some)
}

fn same_length(row: &Json, name: &str, length: usize) -> Result<Option<Vec<i64>>, RowError> {
    let list = numbers(row, name)?;
    match list.as_ref().map(Vec::len).filter(|other| *other != length) {
        None => Ok(list),
        Some(other) => {
            let found = format!("a list of {other} beside {length} ids");
            Err(RowError::Field { field: name.into(), want: "as long as input_ids", found })
        }
    }
}

fn mask(row: &Json, name: &str, length: usize) -> Result<Option<Vec<bool>>, RowError> {
    let Some(list) = same_length(row, name, length)? else { return Ok(None) };
    let flag = |(index, value): (usize, i64)| match value {
        0 | 1 => Ok(value == 1),
        other => {
            let field = format!("{name}[{index}]");
            Err(RowError::Field { field, want: "0 or 1", found: other.to_string() })
        }
    };
    list.into_iter().enumerate().map(flag).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Loss = Loss { assistant_only: true, completion_only: true };

    fn targets(row: &str) -> Result<(Vec<u32>, Vec<bool>), String> {
        let row = Json::parse(row).expect("JSON");
        let row = Tokens::parse(&row).and_then(|tokens| tokens.row(100, ALL));
        row.map(|row| (row.tokens().to_vec(), row.targets().to_vec())).map_err(|error| error.to_string())
    }

    #[test]
    fn labels_and_masks_say_what_is_learnt() {
        let cases: [(&str, &[u32], &[u8]); 5] = [
            (r#"{"input_ids":[5,6,7]}"#, &[5, 6, 7], &[0, 1, 1]),
            (r#"{"input_ids":[5,6,7],"labels":[-100,6,-100]}"#, &[5, 6, 7], &[0, 1, 0]),
            (r#"{"input_ids":[0,5,6,0],"attention_mask":[0,1,1,0],"labels":[-100,5,6,-100]}"#, &[5, 6], &[0, 1]),
            (r#"{"input_ids":[5,6,7],"completion_mask":[0,1,1],"assistant_masks":[1,1,0]}"#, &[5, 6, 7], &[0, 1, 0]),
            (r#"{"input_ids":[5],"labels":null,"attention_mask":[0]}"#, &[], &[]),
        ];
        for (row, ids, flags) in cases {
            assert_eq!(targets(row), Ok((ids.to_vec(), flags.iter().map(|flag| *flag == 1).collect())), "{row}");
        }
    }

    #[test]
    fn positions_and_lengths_are_documents() {
        let starts = |row: &str| Tokens::parse(&Json::parse(row).expect("JSON")).expect(row).later_starts;
        assert_eq!(starts(r#"{"input_ids":[5,6,7],"position_ids":[0,1,2]}"#), [0usize; 0]);
        assert_eq!(starts(r#"{"input_ids":[5,6,7,8],"position_ids":[0,1,0,0]}"#), [2, 3]);
        assert_eq!(starts(r#"{"input_ids":[5,6,7,8],"seq_lengths":[3,1]}"#), [3]);
        assert_eq!(starts(r#"{"input_ids":[5,6,7],"seq_lengths":[3],"position_ids":[0,1,2]}"#), [0usize; 0]);
        // Padding is removed before documents are counted, whatever its positions are.
        let padded =
            r#"{"input_ids":[0,5,6,7,0],"attention_mask":[0,1,1,1,0],"position_ids":[1,0,1,0,0],"seq_lengths":[2,1]}"#;
        assert_eq!(starts(padded), [2]);
        assert_eq!(starts(r#"{"input_ids":[],"position_ids":[],"seq_lengths":[]}"#), [0usize; 0]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (row, want) in [
            (r#"{"input_ids":[5,6],"position_ids":[1,2]}"#, "`position_ids[0]` must be 0 at the first token, but is 1"),
            (r#"{"input_ids":[5,6],"position_ids":[0,2]}"#, "`position_ids[1]` must be one more than before"),
            (r#"{"input_ids":[5,6],"position_ids":[0,-1]}"#, "`position_ids[1]` must be one more than before"),
            (r#"{"input_ids":[5,6],"position_ids":[0]}"#, "`position_ids` must be as long as input_ids"),
            (r#"{"input_ids":[5,6],"seq_lengths":[1]}"#, "`seq_lengths` must be the lengths of the documents"),
            (r#"{"input_ids":[5,6],"seq_lengths":[1,1,1]}"#, "3 lengths that do not sum to 2 tokens"),
            (r#"{"input_ids":[5,6],"seq_lengths":[9223372036854775807]}"#, "do not sum to 2 tokens"),
            (r#"{"input_ids":[5,6],"seq_lengths":[2,0]}"#, "`seq_lengths[1]` must be above 0, but is 0"),
            (
                r#"{"input_ids":[5,6],"seq_lengths":[2],"position_ids":[0,0]}"#,
                "`seq_lengths` must be the lengths that position_ids shows, but is another list",
            ),
            (r#"{"input_ids":[5,100]}"#, "`input_ids[1]` is 100, but token ids are below 100"),
            (r#"{"input_ids":[5,-1]}"#, "`input_ids[1]` is -1"),
            (r#"{"input_ids":[18446744073709551615]}"#, "`input_ids[0]` is"),
            (r#"{"input_ids":[5.0]}"#, "`input_ids[0]` must be a whole number"),
            (r#"{"input_ids":"5"}"#, "`input_ids` must be a list of whole numbers"),
            (r#"{"input_ids":[5,6],"labels":[5]}"#, "`labels` must be as long as input_ids"),
            (r#"{"input_ids":[5,6],"labels":[6,-100]}"#, "labels[0] is 6, but the token there is 5"),
            (r#"{"input_ids":[5,6,7],"attention_mask":[1,0,1]}"#, "`attention_mask[1]`"),
            (r#"{"input_ids":[5],"attention_mask":[2]}"#, "`attention_mask[0]` must be 0 or 1"),
        ] {
            let error = targets(row).expect_err(row);
            assert!(error.contains(want), "{row}: {error}");
        }
    }
}
