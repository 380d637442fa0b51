//! Turns one row of data into tokens and a loss mask. A conversation is rendered by the template
//! once, as a whole; a completion begins where its tokens diverge from those of the prompt alone.

use super::conversation::{Conversation, is_assistant};
use super::error::{RowError, Untrainable};
use super::format::Example;
use super::spans::{self, NoSpans};
use super::template::Template;
use super::tokenizer::Tokenizer;
use crate::row::Row;

/// What the loss counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loss {
    pub(super) assistant_only: bool,
    /// For rows with a prompt and a completion.
    pub(super) completion_only: bool,
}

/// The row of an example, and its entry in the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tokenised {
    pub(super) row: Row,
    /// Number of tokens before truncation.
    pub(super) length: usize,
    /// The last tokens of the prompt changed when the completion was appended, and count as
    /// completion.
    pub(super) boundary_merged: bool,
    pub(super) untrainable: Option<Untrainable>,
}

impl Tokenised {
    fn new(row: Row) -> Self {
        Self { length: row.tokens().len(), row, boundary_merged: false, untrainable: None }
    }

    /// A row that is dropped whatever its tokens are.
    fn dropped(why: Untrainable) -> Self {
        Self { untrainable: Some(why), ..Self::new(Row::document(Vec::new(), Vec::new())) }
    }

    /// Excludes the prompt from the loss: the leading tokens that the row shares with the prompt
    /// alone.
    fn after_prompt(mut self, prompt: &[u32]) -> Self {
        let shared = self.row.tokens().iter().zip(prompt).take_while(|(left, right)| left == right).count();
        self.row.ignore_first(shared);
        self.boundary_merged = shared < prompt.len();
        self
    }

    /// Truncates the row and records why nothing is left to train on, if so; `nothing` is the
    /// reason if that was already so before truncation.
    fn finished(mut self, nothing: Untrainable, length_max: usize) -> Self {
        if self.row.target_count() == 0 {
            self.untrainable = Some(if self.length < 2 { Untrainable::Empty } else { nothing });
        }
        self.row.truncate(length_max);
        if self.untrainable.is_none() && self.row.target_count() == 0 {
            self.untrainable = Some(Untrainable::Truncated);
        }
        self
    }
}

/// Why an example could not be tokenised.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    Row(RowError),
    NoTokenizer,
    NoTemplate,
    NoEndOfText,
    NoAssistantMask {
        template: String,
        why: String,
    },
    /// The tokenizer has more tokens than the model.
    Vocabulary {
        token: u32,
        vocabulary: usize,
    },
}

impl From<RowError> for Problem {
    fn from(error: RowError) -> Self {
        Self::Row(error)
    }
}

/// Everything needed to tokenise examples.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tools<'a> {
    /// Not needed for rows of tokens.
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) template: Option<&'a Template>,
    /// Number of tokens of the model.
    pub(super) vocabulary: Option<usize>,
    pub(super) loss: Loss,
    pub(super) length_max: usize,
    pub(super) drop_special: bool,
}

impl Tools<'_> {
    /// Every token id of a row is below this.
    fn id_limit(&self) -> u32 {
        let model = self.vocabulary.and_then(|vocabulary| u32::try_from(vocabulary).ok()).unwrap_or(u32::MAX);
        self.tokenizer.map_or(model, |tokenizer| tokenizer.id_limit().min(model))
    }
}

pub(super) fn tokenise(example: &Example, tools: Tools<'_>) -> Result<Tokenised, Problem> {
    let Tools { template, loss, length_max, .. } = tools;
    if let Example::Tokens(row) = example {
        let row = row.row(tools.id_limit(), loss)?;
        return Ok(Tokenised::new(row).finished(Untrainable::NoLabel, length_max));
    }
    let tokenizer = tools.tokenizer.ok_or(Problem::NoTokenizer)?;
    if tools.drop_special && has_special(example, tokenizer) {
        return Ok(Tokenised::dropped(Untrainable::SpecialToken));
    }
    let (tokenised, nothing) = match example {
        Example::Chat(conversation) => {
            let template = template.ok_or(Problem::NoTemplate)?;
            (chat(conversation, tokenizer, template, loss.assistant_only)?, Untrainable::NoAssistant)
        }
        Example::ChatPair { conversation, prompt_count } => {
            let template = template.ok_or(Problem::NoTemplate)?;
            (chat_pair(conversation, *prompt_count, tokenizer, template, loss)?, Untrainable::NoCompletion)
        }
        Example::Pair { prompt, completion } => {
            (pair(prompt, completion, tokenizer, loss.completion_only)?, Untrainable::NoCompletion)
        }
        Example::Text(text) => {
            let tokens = plain(text, tokenizer)?;
            let targets = vec![true; tokens.len()];
            (Tokenised::new(Row::document(tokens, targets)), Untrainable::Empty)
        }
        Example::Tokens(_) => unreachable!("rows of tokens are done above"),
    };
    match tools.vocabulary.zip(tokenised.row.tokens().iter().max().copied()) {
        Some((vocabulary, token)) if token as usize >= vocabulary => Err(Problem::Vocabulary { token, vocabulary }),
        _ => Ok(tokenised.finished(nothing, length_max)),
    }
}

/// Whether text of the row reads as a special token. An end-of-text token at the very end of a
/// plain text is intended.
fn has_special(example: &Example, tokenizer: &Tokenizer) -> bool {
    let end = tokenizer.special_tokens().get("eos_token").map_or("", String::as_str);
    let special = |text: &str| tokenizer.has_special_text(text);
    let plain = |text: &str| special(text.strip_suffix(end).unwrap_or(text));
    match example {
        Example::Chat(conversation) | Example::ChatPair { conversation, .. } => {
            let mut found = false;
            conversation.visit_text(&mut |text| found |= special(text));
            found
        }
        Example::Pair { prompt, completion } => special(prompt) || plain(completion),
        Example::Text(text) => plain(text),
        Example::Tokens(_) => false,
    }
}

fn chat(
    conversation: &Conversation,
    tokenizer: &Tokenizer,
    template: &Template,
    assistant_only: bool,
) -> Result<Tokenised, Problem> {
    let rendered = template.render(conversation, false)?;
    let encoding = tokenizer.encode(&rendered.text, false)?;
    let targets = if assistant_only {
        let spans = if template.marked() {
            rendered.spans
        } else {
            spans::derive(template, conversation, &rendered.text, &encoding.offsets).map_err(
                |problem| match problem {
                    NoSpans::Row(error) => Problem::Row(error),
                    NoSpans::Template(why) => Problem::NoAssistantMask { template: template.name().into(), why },
                },
            )?
        };
        if spans.is_empty() && conversation.assistant_count() > 0 {
            let why = "its {% generation %} blocks print nothing".into();
            return Err(Problem::NoAssistantMask { template: template.name().into(), why });
        }
        spans::flags(&encoding.offsets, &spans)
    } else {
        vec![true; encoding.tokens.len()]
    };
    Ok(Tokenised::new(Row::document(encoding.tokens, targets)))
}

fn chat_pair(
    conversation: &Conversation,
    prompt_count: usize,
    tokenizer: &Tokenizer,
    template: &Template,
    loss: Loss,
) -> Result<Tokenised, Problem> {
    // The whole completion is the assistant's unless other roles occur in it.
    let others = conversation.messages[prompt_count..].iter().any(|message| !is_assistant(message));
    let assistant_only = loss.assistant_only && (others || !loss.completion_only);
    let whole = chat(conversation, tokenizer, template, assistant_only)?;
    if !loss.completion_only {
        return Ok(whole);
    }
    let prompt = Conversation { messages: conversation.messages[..prompt_count].to_vec(), ..conversation.clone() };
    let prompt = tokenizer.encode(&template.render(&prompt, true)?.text, false)?.tokens;
    Ok(whole.after_prompt(&prompt))
}

fn pair(prompt: &str, completion: &str, tokenizer: &Tokenizer, completion_only: bool) -> Result<Tokenised, Problem> {
    let tokens = plain(&format!("{prompt}{completion}"), tokenizer)?;
    let targets = vec![true; tokens.len()];
    let whole = Tokenised::new(Row::document(tokens, targets));
    if !completion_only {
        return Ok(whole);
    }
    let prompt = tokenizer.encode(prompt, true)?.tokens;
    Ok(whole.after_prompt(&prompt))
}

/// Tokens of a text that does not come from a template, with an end-of-text token unless it has
/// one.
fn plain(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, Problem> {
    let end = tokenizer.end_of_text().ok_or(Problem::NoEndOfText)?;
    let mut tokens = tokenizer.encode(text, true)?.tokens;
    if tokens.last() != Some(&end) {
        tokens.push(end);
    }
    Ok(tokens)
}
