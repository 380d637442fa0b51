//! Finds the characters the assistant wrote, for any template: by rendering, without knowledge of
//! the template.
//!
//! Strings of the conversation get invisible marks, and the rendered text with the marks removed
//! must equal the unmarked rendering: the marks then locate each message. An answer begins where
//! its prompt ends (the messages before it, rendered with a generation prompt) and ends where a
//! conversation that stops there would end. Both are compared from the nearest mark on, so that a
//! template may change earlier text. Anything that does not match is an error that names the turn.

use super::conversation::{Conversation, is_assistant};
use super::error::RowError;
use super::json::Json;
use super::spans::NoSpans;
use super::template::Template;

/// Unicode noncharacters, never meant for text: a mark is OPEN, the number of its message in 8
/// hexadecimal digits, CLOSE.
const OPEN: char = '\u{fdd2}';
const CLOSE: char = '\u{fdd3}';
const DIGIT_ZERO: u32 = 0xfde0;
const RESERVED: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// BOUND: text rendered for one conversation. Every turn takes two renderings of everything before
/// it.
const RENDERED_BYTES_MAX: usize = 1 << 28;

/// Which strings are marked. A template may compare the names of tools; then only content can be
/// marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    All,
    Content,
    Nothing,
}

/// A rendered conversation and the positions of its marks: message and byte.
#[derive(Debug, Default)]
struct Marked {
    text: String,
    marks: Vec<(usize, usize)>,
}

impl Marked {
    fn first(&self, message: usize) -> Option<usize> {
        self.marks.iter().find(|(marked, _)| *marked == message).map(|(_, at)| *at)
    }

    fn last(&self, message: usize) -> Option<usize> {
        self.marks.iter().rfind(|(marked, _)| *marked == message).map(|(_, at)| *at)
    }
}

/// Byte spans of the assistant's turns in `text`, the rendered conversation; `offsets` are those of
/// its tokens.
pub(super) fn derive(
    template: &Template,
    conversation: &Conversation,
    text: &str,
    offsets: &[(usize, usize)],
) -> Result<Vec<(usize, usize)>, NoSpans> {
    let mut reserved = None;
    conversation.visit_text(&mut |text| reserved = reserved.or_else(|| text.chars().find(|c| RESERVED.contains(c))));
    if let Some(code) = reserved {
        return Err(NoSpans::Row(RowError::Reserved { code: code as u32 }));
    }
    let mut turns = Turns { template, conversation, offsets, level: Level::All, rendered: 0, full: Marked::default() };
    turns.full = loop {
        match turns.render(conversation.messages.len(), false) {
            Ok(full) if full.text == text => break full,
            Ok(_) if turns.level == Level::Nothing => {
                return Err(NoSpans::Template("it does not render the same conversation the same way twice".into()));
            }
            Err(error) if turns.level == Level::Nothing => return Err(NoSpans::Row(error)),
            // The marks change what the template prints: use fewer.
            _ => turns.level = if turns.level == Level::All { Level::Content } else { Level::Nothing },
        }
    };
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for turn in (0..conversation.messages.len()).filter(|turn| is_assistant(&conversation.messages[*turn])) {
        let (start, end) = turns.span(turn)?;
        if spans.last().is_some_and(|(_, before)| start < *before) {
            return Err(ambiguous(turn, "it begins inside the turn before it"));
        }
        spans.push((start, end));
    }
    Ok(spans)
}

struct Turns<'a> {
    template: &'a Template,
    conversation: &'a Conversation,
    offsets: &'a [(usize, usize)],
    level: Level,
    /// Bytes rendered so far.
    rendered: usize,
    /// The whole conversation.
    full: Marked,
}

impl Turns<'_> {
    /// The first `count` messages, marked.
    fn render(&mut self, count: usize, prompt: bool) -> Result<Marked, RowError> {
        let messages = self.conversation.messages[..count].iter().enumerate();
        let messages = messages.map(|(index, message)| marked(message, index, self.level)).collect();
        let Conversation { tools, extra, .. } = self.conversation;
        let part = Conversation { messages, tools: tools.clone(), extra: extra.clone() };
        let rendered = self.template.render(&part, prompt)?.text;
        self.rendered += rendered.len();
        if self.rendered > RENDERED_BYTES_MAX {
            let why = format!("the conversation is too long to find it: over {RENDERED_BYTES_MAX} bytes were rendered");
            return Err(RowError::Turn { turn: count - 1, why });
        }
        Ok(unmark(&rendered))
    }

    fn span(&mut self, turn: usize) -> Result<(usize, usize), NoSpans> {
        let region = self.full.first(turn).zip(self.full.last(turn));
        if let Some((first, last)) = region
            && self.full.marks.iter().any(|(message, at)| *message != turn && first < *at && *at < last)
        {
            return Err(ambiguous(turn, "it contains another message"));
        }
        if self.level == Level::All && region.is_none() && has_text(&self.conversation.messages[turn]) {
            return Err(ambiguous(turn, "the template leaves it out"));
        }
        let start = self.start(turn, region.map(|(first, _)| first))?;
        let end = self.end(turn, start, region.map(|(_, last)| last))?;
        if end <= start && has_text(&self.conversation.messages[turn]) {
            return Err(ambiguous(turn, "the template leaves it out"));
        }
        Ok((start, end.max(start)))
    }

    /// The latest message before `turn` that is marked in both texts: where its marks end in the
    /// whole, and in `part`.
    fn anchor(&self, turn: usize, part: &Marked) -> (usize, usize) {
        let both = (0..turn).rev().find_map(|message| self.full.last(message).zip(part.last(message)));
        both.unwrap_or((0, 0))
    }

    /// Where the prompt for the turn ends; `bound` is the first mark of the turn.
    fn start(&mut self, turn: usize, bound: Option<usize>) -> Result<usize, NoSpans> {
        let Ok(prompt) = self.render(turn, true) else { return self.start_by_header(turn, bound) };
        let (here, there) = self.anchor(turn, &prompt);
        let Some(before) = self.full.text.get(here..bound.unwrap_or(self.full.text.len())) else {
            return Err(ambiguous(turn, "the message before it is printed after it"));
        };
        let asked = &prompt.text[there..];
        let shared = whole_tags(asked, common(asked, before));
        // The text between the prompt and the first word: a header that no prompt has, or an empty
        // thought.
        let header = if bound.is_some() { before[shared..].trim().to_owned() } else { String::new() };
        let (start, whole, asked_bytes) = (here + shared, shared == asked.len(), there + shared);
        if whole && header.is_empty() {
            return Ok(start);
        }
        let Ok(history) = self.render(turn, false) else {
            return Err(ambiguous(turn, "the messages before it cannot be rendered alone"));
        };
        let history_bytes = common(&prompt.text, &history.text);
        let has_prompt = prompt.text.len() > history_bytes;
        // A call begins with its own tags, which the assistant writes too.
        if whole && (has_prompt || !has_content(&self.conversation.messages[turn])) {
            return Ok(start);
        }
        if whole {
            let why = format!("it has no generation prompt, and prints `{}` before an answer", header.escape_debug());
            return Err(NoSpans::Template(why));
        }
        // A part of the prompt may be missing in the whole: for example, the opening of a thought
        // that is not repeated.
        let some = asked_bytes > history_bytes || (asked_bytes == history_bytes && header.is_empty());
        if some && self.level != Level::Nothing {
            return Ok(start);
        }
        Err(ambiguous(turn, "the messages before it are printed differently without it"))
    }

    /// If there is nothing to render before the turn: after the header seen in the prompt of the
    /// whole conversation.
    fn start_by_header(&mut self, turn: usize, bound: Option<usize>) -> Result<usize, NoSpans> {
        let whole = self.render(self.conversation.messages.len(), true).map_err(NoSpans::Row)?;
        let header = &whole.text[common(&whole.text, &self.full.text)..];
        let here = (0..turn).rev().find_map(|message| self.full.last(message)).unwrap_or(0);
        let before = self.full.text.get(here..bound.unwrap_or(here)).unwrap_or_default();
        let mut found = before.match_indices(header).filter(|_| !header.is_empty());
        match (found.next(), found.next()) {
            (Some((at, header)), None) => Ok(here + at + header.len()),
            _ => Err(ambiguous(turn, "the messages before it cannot be rendered alone")),
        }
    }

    /// Where the turn would end if the conversation stopped there; `last` is the last mark of the
    /// turn.
    fn end(&mut self, turn: usize, start: usize, last: Option<usize>) -> Result<usize, NoSpans> {
        let stopped = self.render(turn + 1, false).map_err(|error| ambiguous(turn, error.to_string()))?;
        let marks = last.zip(stopped.last(turn));
        let (here, there) = marks.unwrap_or_else(|| self.anchor(turn, &stopped));
        let (rest, tail) = (&self.full.text[here..], &stopped.text[there..]);
        let shared = common(tail, rest);
        if shared == tail.len() {
            return Ok(here + shared);
        }
        if marks.is_none() && (self.level == Level::Nothing || has_text(&self.conversation.messages[turn])) {
            return Err(ambiguous(turn, "its text is printed differently when messages follow"));
        }
        // One text closes a conversation that stops, and another follows here. They may begin
        // alike: only whole tags and whole tokens count.
        let alike = here + whole_tags(tail, shared);
        let ends = self.offsets.iter().map(|(_, end)| *end).take_while(|end| *end <= alike);
        Ok(ends.last().unwrap_or(0).max(here).max(start))
    }
}

fn ambiguous(turn: usize, why: impl Into<String>) -> NoSpans {
    NoSpans::Row(RowError::Turn { turn, why: why.into() })
}

fn has_content(message: &Json) -> bool {
    matches!(message.get("content"), Some(Json::Text(text)) if !text.trim().is_empty())
}

/// Whether the assistant writes anything in this message.
fn has_text(message: &Json) -> bool {
    has_content(message) || matches!(message.get("tool_calls"), Some(Json::Array(calls)) if !calls.is_empty())
}

/// Length of the common prefix in bytes, whole characters only.
fn common(left: &str, right: &str) -> usize {
    let shared = left.bytes().zip(right.bytes()).take_while(|(left, right)| left == right).count();
    (0..=shared).rev().find(|at| left.is_char_boundary(*at)).unwrap_or(0)
}

/// The first `shared` bytes, minus a tag that they would split.
fn whole_tags(text: &str, shared: usize) -> usize {
    if shared == text.len() {
        return shared;
    }
    let open = |(open, close): (char, char)| text[..shared].rfind(open).filter(|at| !text[*at..shared].contains(close));
    [('<', '>'), ('[', ']')].into_iter().filter_map(open).min().unwrap_or(shared)
}

fn marked(message: &Json, index: usize, level: Level) -> Json {
    let Json::Object(entries) = message else { return message.clone() };
    let mark = |key: &str, value: &Json| match (key, level) {
        (_, Level::Nothing) => value.clone(),
        ("content", _) | ("reasoning_content" | "thinking" | "reasoning", Level::All) => marked_value(value, index),
        ("tool_calls", Level::All) => marked_calls(value, index),
        _ => value.clone(),
    };
    Json::Object(entries.iter().map(|(key, value)| (key.clone(), mark(key, value))).collect())
}

/// Marks names and arguments of tool calls at any depth; ids and types stay unchanged.
fn marked_calls(value: &Json, index: usize) -> Json {
    match value {
        Json::Array(items) => Json::Array(items.iter().map(|item| marked_calls(item, index)).collect()),
        Json::Object(entries) => {
            let mark = |key: &str, value: &Json| match key {
                "name" | "arguments" => marked_value(value, index),
                _ => marked_calls(value, index),
            };
            Json::Object(entries.iter().map(|(key, value)| (key.clone(), mark(key, value))).collect())
        }
        other => other.clone(),
    }
}

fn marked_value(value: &Json, index: usize) -> Json {
    match value {
        Json::Text(text) => Json::Text(marked_text(text, index)),
        Json::Array(items) => Json::Array(items.iter().map(|item| marked_value(item, index)).collect()),
        Json::Object(entries) => {
            Json::Object(entries.iter().map(|(key, value)| (key.clone(), marked_value(value, index))).collect())
        }
        other => other.clone(),
    }
}

/// Marks go inside the white space at both ends, which templates trim, and after each thought,
/// before which they cut.
fn marked_text(text: &str, index: usize) -> String {
    const THOUGHT_END: &str = "</think>";
    let core = text.trim();
    if core.is_empty() {
        return text.to_owned();
    }
    let digit = |shift: u32| char::from_u32(DIGIT_ZERO + ((index >> shift) & 15) as u32).unwrap_or(OPEN);
    let mark: String = [OPEN].into_iter().chain((0..8).rev().map(|place| digit(place * 4))).chain([CLOSE]).collect();
    let mut out = text[..text.len() - text.trim_start().len()].to_owned();
    for (piece, part) in core.split(THOUGHT_END).enumerate() {
        if piece > 0 {
            out.push_str(THOUGHT_END);
        }
        let body = part.trim_start();
        out.push_str(&part[..part.len() - body.len()]);
        if piece == 0 || !body.is_empty() {
            out.push_str(&mark);
        }
        out.push_str(body);
    }
    out.push_str(&mark);
    out.push_str(&text[text.trim_end().len()..]);
    out
}

fn unmark(text: &str) -> Marked {
    let mut marked = Marked { text: String::with_capacity(text.len()), marks: Vec::new() };
    let mut pieces = text.split(OPEN);
    marked.text.push_str(pieces.next().unwrap_or_default());
    for piece in pieces {
        let (number, rest) = piece.split_once(CLOSE).unwrap_or((piece, ""));
        let digits = number.chars().map(|digit| (u32::from(digit).wrapping_sub(DIGIT_ZERO) & 15) as usize);
        marked.marks.push((digits.fold(0, |sum, digit| sum * 16 + digit), marked.text.len()));
        marked.text.push_str(rest);
    }
    marked
}

#[cfg(test)]
mod tests {
    use super::super::format::{self, Example, RowFormat};
    use super::super::spans::by_family;
    use super::*;
    use std::collections::BTreeMap;

    const TEMPLATES: [(&str, &str); 3] = [
        ("chatml", include_str!("../../tests/fixtures/templates/chatml.jinja")),
        ("thinking", include_str!("../../tests/fixtures/templates/thinking.jinja")),
        ("headers", include_str!("../../tests/fixtures/templates/headers.jinja")),
    ];

    fn conversations() -> Vec<Conversation> {
        let rows = [
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]"#,
            r#"[{"role":"system","content":"s"},{"role":"user","content":"a"},{"role":"assistant","content":" b\n"},
                {"role":"user","content":"b"},{"role":"assistant","content":"b"},{"role":"user","content":"more"}]"#,
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"<think>\nt\n</think>\n\nb"},
                {"role":"user","content":"c"},{"role":"assistant","content":"<think>\nu\n</think>\n\nd"}]"#,
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"why"},
                {"role":"user","content":"c"},{"role":"assistant","content":"","reasoning_content":"so"}]"#,
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":[{"type":"function",
                "function":{"name":"f","arguments":{"x":"1","y":[2,"z"]}}}]},{"role":"tool","content":"{}"},
                {"role":"assistant","content":"done \u00fc"}]"#,
        ];
        let conversation = |row: &&str| {
            let row = Json::parse(&format!("{{\"messages\": {row}}}")).expect("JSON");
            match format::parse(&row, RowFormat::Messages, None, true) {
                Ok(Example::Chat(conversation)) => conversation,
                other => panic!("{other:?}"),
            }
        };
        rows.iter().map(conversation).collect()
    }

    /// On families whose turns are known from their tokens, rendering finds the same text.
    #[test]
    fn rendering_finds_what_the_families_tell() {
        let mut compared = 0;
        for (name, source) in TEMPLATES {
            let special = BTreeMap::from([("bos_token".to_string(), "<|begin_of_text|>".to_string())]);
            let template = Template::new(name, source, "2025-01-01", &special).expect("a template");
            for (index, conversation) in conversations().iter().enumerate() {
                let Ok(rendered) = template.render(conversation, false) else { continue };
                let offsets: Vec<_> =
                    rendered.text.char_indices().map(|(at, letter)| (at, at + letter.len_utf8())).collect();
                let known = by_family(&template, conversation, &rendered.text).expect("a family").expect("spans");
                let found = derive(&template, conversation, &rendered.text, &offsets);
                assert_eq!(found, Ok(known), "{name}, conversation {index}: {}", rendered.text);
                compared += 1;
            }
        }
        // The third template refuses tool calls.
        assert!(compared >= 14, "{compared}");
    }

    #[test]
    fn marks_come_out_as_they_went_in() {
        let text = " <think>a</think>\n\nb c \n";
        let marked = unmark(&marked_text(text, 0x1_2345));
        assert_eq!((marked.text.as_str(), marked.marks), (text, vec![(0x1_2345, 1), (0x1_2345, 19), (0x1_2345, 22)]));
        assert_eq!(marked_text(" \n", 3), " \n");
    }
}
