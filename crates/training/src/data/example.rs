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
    /// Where further documents start, after the first at 0.
    pub(super) later_starts: Vec<usize>,
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
    NoTokenizer,
    NoTemplate,
    NoEndOfText,
    NoAssistantMask {
        template: String,
        why: String,
    },
    /// The tokenizer knows more tokens than the model.
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

/// What examples are made into tokens with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tools<'a> {
    /// Rows of tokens need none.
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) template: Option<&'a Template>,
    /// Tokens that the model knows.
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
        return Ok(finished(row.tokenised(tools.id_limit(), loss)?, Untrainable::NoLabel, length_max));
    }
    let tokenizer = tools.tokenizer.ok_or(Problem::NoTokenizer)?;
    if tools.drop_special && has_special(example, tokenizer) {
        return Ok(Tokenised { untrainable: Some(Untrainable::SpecialToken), ..Tokenised::default() });
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
            (Tokenised { tokens, targets, ..Tokenised::default() }, Untrainable::Empty)
        }
        Example::Tokens(_) => unreachable!("rows of tokens are done above"),
    };
    match tools.vocabulary.zip(tokenised.tokens.iter().max().copied()) {
        Some((vocabulary, token)) if token as usize >= vocabulary => Err(Problem::Vocabulary { token, vocabulary }),
        _ => Ok(finished(tokenised, nothing, length_max)),
    }
}

/// Cuts the end off and says why nothing is left to train on, where it is so; `nothing` is why before the cut.
fn finished(mut tokenised: Tokenised, nothing: Untrainable, length_max: usize) -> Tokenised {
    // Nothing comes before the first token of a document, so nothing predicts it.
    for start in [0].iter().chain(&tokenised.later_starts) {
        if let Some(first) = tokenised.targets.get_mut(*start) {
            *first = false;
        }
    }
    tokenised.length = tokenised.tokens.len();
    let trainable = |tokenised: &Tokenised| tokenised.targets.contains(&true);
    if !trainable(&tokenised) {
        tokenised.untrainable = Some(if tokenised.length < 2 { Untrainable::Empty } else { nothing });
    }
    tokenised.tokens.truncate(length_max);
    tokenised.targets.truncate(length_max);
    tokenised.later_starts.retain(|start| *start < length_max);
    if tokenised.untrainable.is_none() && !trainable(&tokenised) {
        tokenised.untrainable = Some(Untrainable::Truncated);
    }
    tokenised
}

/// Whether text of the row reads as a special token. An end-of-text token at the very end of a plain text is meant.
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
