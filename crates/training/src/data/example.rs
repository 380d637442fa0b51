//! One row of data to tokens, and which of them the loss counts. A conversation goes through the template once, as a
//! whole; a completion begins where its tokens part from those of the prompt alone.

use super::conversation::{Conversation, is_assistant};
use super::error::{RowError, Untrainable};
use super::format::Example;
use super::spans::{self, NoSpans};
use super::template::Template;
use super::tokenizer::Tokenizer;

/// What the loss counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loss {
    pub(super) assistant_only: bool,
    /// For rows with a prompt and a completion.
    pub(super) completion_only: bool,
}

/// An example as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tokenised {
    pub(super) tokens: Vec<u32>,
    pub(super) targets: Vec<bool>,
    /// Number of tokens before truncation.
    pub(super) length: usize,
    /// The last tokens of the prompt changed when the completion followed, and count as completion.
    pub(super) boundary_merged: bool,
    pub(super) untrainable: Option<Untrainable>,
}

/// Why an example has no tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    Row(RowError),
    NoTemplate,
    NoEndOfText,
    NoAssistantMask { template: String, why: String },
}

impl From<RowError> for Problem {
    fn from(error: RowError) -> Self {
        Self::Row(error)
    }
}

pub(super) fn tokenise(
    example: &Example,
    tokenizer: &Tokenizer,
    template: Option<&Template>,
    loss: Loss,
    length_max: usize,
) -> Result<Tokenised, Problem> {
    let (mut tokenised, nothing) = match example {
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
            (Tokenised { tokens, targets, ..Tokenised::default() }, Untrainable::Empty)
        }
        Example::Tokens(row) => (row.tokenised(tokenizer.id_limit(), loss)?, Untrainable::NoLabel),
    };
    // Nothing comes before the first token, so nothing predicts it.
    if let Some(first) = tokenised.targets.first_mut() {
        *first = false;
    }
    tokenised.length = tokenised.tokens.len();
    let trainable = |tokenised: &Tokenised| tokenised.targets.contains(&true);
    if !trainable(&tokenised) {
        tokenised.untrainable = Some(if tokenised.length < 2 { Untrainable::Empty } else { nothing });
    }
    tokenised.tokens.truncate(length_max);
    tokenised.targets.truncate(length_max);
    if tokenised.untrainable.is_none() && !trainable(&tokenised) {
        tokenised.untrainable = Some(Untrainable::Truncated);
    }
    Ok(tokenised)
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
            spans::derive(template, conversation, &rendered.text).map_err(|problem| match problem {
                NoSpans::Row(error) => Problem::Row(error),
                NoSpans::Template(why) => Problem::NoAssistantMask { template: template.name().into(), why },
            })?
        };
        if spans.is_empty() && conversation.assistant_count() > 0 {
            let why = "its {% generation %} blocks print nothing".into();
            return Err(Problem::NoAssistantMask { template: template.name().into(), why });
        }
        spans::flags(&encoding.offsets, &spans)
    } else {
        vec![true; encoding.tokens.len()]
    };
    Ok(Tokenised { tokens: encoding.tokens, targets, ..Tokenised::default() })
}

fn chat_pair(
    conversation: &Conversation,
    prompt_count: usize,
    tokenizer: &Tokenizer,
    template: &Template,
    loss: Loss,
) -> Result<Tokenised, Problem> {
    // The completion is the assistant's own unless others speak in it, too.
    let others = conversation.messages[prompt_count..].iter().any(|message| !is_assistant(message));
    let assistant_only = loss.assistant_only && (others || !loss.completion_only);
    let whole = chat(conversation, tokenizer, template, assistant_only)?;
    if !loss.completion_only {
        return Ok(whole);
    }
    let prompt = Conversation { messages: conversation.messages[..prompt_count].to_vec(), ..conversation.clone() };
    let prompt = tokenizer.encode(&template.render(&prompt, true)?.text, false)?.tokens;
    Ok(after_prompt(whole, &prompt))
}

fn pair(prompt: &str, completion: &str, tokenizer: &Tokenizer, completion_only: bool) -> Result<Tokenised, Problem> {
    let tokens = plain(&format!("{prompt}{completion}"), tokenizer)?;
    let whole = Tokenised { targets: vec![true; tokens.len()], tokens, ..Tokenised::default() };
    if !completion_only {
        return Ok(whole);
    }
    let prompt = tokenizer.encode(prompt, true)?.tokens;
    Ok(after_prompt(whole, &prompt))
}

/// Takes the prompt out of the loss: the tokens that the whole shares with the prompt alone, from the start.
fn after_prompt(mut whole: Tokenised, prompt: &[u32]) -> Tokenised {
    let shared = whole.tokens.iter().zip(prompt).take_while(|(left, right)| left == right).count();
    whole.targets[..shared].fill(false);
    whole.boundary_merged = shared < prompt.len();
    whole
}

/// A text that does not come from a template, with an end-of-text token unless it has one.
fn plain(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, Problem> {
    let end = tokenizer.end_of_text().ok_or(Problem::NoEndOfText)?;
    let mut tokens = tokenizer.encode(text, true)?.tokens;
    if tokens.last() != Some(&end) {
        tokens.push(end);
    }
    Ok(tokens)
}
