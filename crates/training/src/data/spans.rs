//! Finds the characters the assistant wrote if a template does not mark them. Known template
//! families wrap every turn in special tokens; the assistant wrote the text between its header and
//! the end of its turn. For other templates `turns` finds it by rendering. Anything that does not
//! match exactly is an error, never a guess.

use super::conversation::Conversation;
use super::error::RowError;
use super::template::Template;
use super::turns;

/// How a family of templates wraps an assistant turn.
struct TurnMarks {
    /// The token that begins a turn.
    open: &'static str,
    header: &'static str,
    /// Tokens that end a turn; they are trained on.
    ends: &'static [&'static str],
    /// A line break after the end also belongs to the turn.
    line_break: bool,
}

const TURN_MARKS: [TurnMarks; 2] = [
    TurnMarks { open: "<|im_start|>", header: "<|im_start|>assistant\n", ends: &["<|im_end|>"], line_break: true },
    TurnMarks {
        open: "<|start_header_id|>",
        header: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ends: &["<|eot_id|>", "<|eom_id|>"],
        line_break: false,
    },
];

/// Why there are no spans.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoSpans {
    Row(RowError),
    Template(String),
}

/// Byte spans of assistant text in the rendered conversation; `offsets` are those of its tokens.
pub(super) fn derive(
    template: &Template,
    conversation: &Conversation,
    text: &str,
    offsets: &[(usize, usize)],
) -> Result<Vec<(usize, usize)>, NoSpans> {
    match by_family(template, conversation, text)? {
        Some(spans) => Ok(spans),
        None => turns::derive(template, conversation, text, offsets),
    }
}

/// The spans if the template belongs to a known family: one for every assistant message.
pub(super) fn by_family(
    template: &Template,
    conversation: &Conversation,
    text: &str,
) -> Result<Option<Vec<(usize, usize)>>, NoSpans> {
    let source = template.source();
    let fits = |family: &&TurnMarks| source.contains(family.open) && family.ends.iter().any(|end| source.contains(end));
    let Some(family) = TURN_MARKS.iter().find(fits) else { return Ok(None) };
    let mut intruder = None;
    conversation.visit_text(&mut |text| {
        let mut tokens = family.ends.iter().chain([&family.open]);
        intruder = intruder.or_else(|| tokens.find(|token| text.contains(**token)));
    });
    if let Some(token) = intruder {
        return Err(NoSpans::Row(RowError::Ambiguous { token: (*token).to_owned() }));
    }
    let spans: Vec<_> = turns(family, text).collect();
    Ok((spans.len() == conversation.assistant_count()).then_some(spans))
}

fn turns<'a>(family: &'a TurnMarks, text: &'a str) -> impl Iterator<Item = (usize, usize)> + 'a {
    text.match_indices(family.header).filter_map(|(at, header)| {
        let start = at + header.len();
        let rest = &text[start..];
        let ends = family.ends.iter().filter_map(|end| rest.find(end).map(|at| at + end.len()));
        let mut length = ends.min()?;
        if family.line_break && rest[length..].starts_with('\n') {
            length += 1;
        }
        Some((start, start + length))
    })
}

/// Marks the tokens that overlap a span. Both lists are in order.
pub(super) fn flags(offsets: &[(usize, usize)], spans: &[(usize, usize)]) -> Vec<bool> {
    let mut reached = 0;
    let mut next = 0;
    let mut flags = Vec::with_capacity(offsets.len());
    for &(start, end) in offsets {
        // Some tokenizers trim white space from offsets: a token of white space alone is then
        // empty, and covers the range from the previous token to its end.
        let (start, end) = if start < end { (start, end) } else { (reached.min(end), end) };
        while next < spans.len() && spans[next].1 <= start {
            next += 1;
        }
        flags.push(next < spans.len() && spans[next].0 < end && start < spans[next].1);
        reached = reached.max(end);
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_overlap_spans() {
        let offsets = [(0, 2), (2, 5), (5, 6), (6, 9), (9, 9), (9, 12)];
        assert_eq!(flags(&offsets, &[(5, 9)]), [false, false, true, true, false, false]);
        assert_eq!(flags(&offsets, &[(4, 7), (11, 12)]), [false, true, true, true, false, true]);
        assert_eq!(flags(&offsets, &[]), [false; 6]);
        // Several tokens of one character share its range; trimmed white space has no range.
        assert_eq!(flags(&[(0, 1), (1, 4), (1, 4), (4, 6)], &[(1, 4)]), [false, true, true, false]);
        assert_eq!(flags(&[(0, 3), (4, 4), (4, 6)], &[(3, 4)]), [false, true, false]);
    }
}
