//! `isobit generate`: text from a model, an adapter, or both side by side, shown as it is
//! generated; and the code it shares with `isobit chat`.

use crate::Failure;
use crate::backend::{Chosen, Job, on_device};
use crate::stderr::tell;
use crate::{adapter, input, model};
use isobit_kernels::Backend;
use isobit_models::{Built, Sampling, Session};
use isobit_numerics::slices::Profile;
use isobit_training::data::{self, Template, Tokenizer};
use isobit_training::prepare::{RunError, model_config};
use std::io::Write;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: model::Arguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Text to continue; may be repeated. Default: the lines of standard input
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Render the prompt with the chat template, as a user message
    #[arg(long)]
    chat: bool,
    /// With an adapter: also print the base model's text
    #[arg(long, requires = "adapter")]
    compare: bool,
    /// Print one JSON object per text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SamplingArguments {
    /// Sampling temperature; 0 always picks the most likely token
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f64,
    /// Sample from the most likely tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f64,
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=131_072))]
    pub(crate) max_tokens: u32,
}

impl SamplingArguments {
    /// The most likely token, always.
    pub(crate) const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: 42, max_tokens: 64 };

    pub(crate) fn rule(&self) -> Result<Sampling, Failure> {
        if !(0.0..=100.0).contains(&self.temperature) {
            let message = format!("--temperature {} is out of range", self.temperature);
            return Err(Failure::usage(message, "give 0 for the most likely token, or a number up to 100"));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let message = format!("--top-p {} is out of range", self.top_p);
            return Err(Failure::usage(message, "give a number above 0 and at most 1; 1 leaves no token out"));
        }
        Ok(Sampling { temperature: self.temperature, top_p: self.top_p, seed: self.seed })
    }
}

/// Tokenizer, template and limits of a model folder.
pub(crate) struct Texts {
    pub(crate) tokenizer: Tokenizer,
    template: Option<Template>,
    pub(crate) max_positions: usize,
    vocabulary: usize,
    /// Variables of the chat template.
    variables: data::Variables,
}

impl Texts {
    pub(crate) fn open(arguments: &model::Arguments) -> Result<Self, RunError> {
        let folder = model::located(&arguments.model);
        let config = model_config(&folder)?;
        let (tokenizer, template) = data::open(&folder, &data::DataConfig::default().date)?;
        let variables = crate::data::variables(&arguments.options.template_var);
        Ok(Self { tokenizer, template, max_positions: config.max_positions, vocabulary: config.vocabulary, variables })
    }

    /// Fails if the model has no chat template.
    pub(crate) fn needs_template(&self, hint: &str) -> Result<&Template, Failure> {
        self.template.as_ref().ok_or_else(|| Failure::usage("the model folder has no chat template", hint))
    }

    /// Renders a conversation as the text that an answer continues.
    pub(crate) fn rendered(&self, messages: &[(String, String)]) -> Result<String, Failure> {
        let template = self.needs_template("leave out `--chat`")?;
        let list: Vec<_> =
            messages.iter().map(|(role, content)| serde_json::json!({"role": role, "content": content})).collect();
        let list = serde_json::Value::from(list);
        let row = format!("{{\"messages\": {list}, \"chat_template_kwargs\": {}}}", self.variables);
        let rendered = template.render_row(&row, true);
        rendered.map(|rendered| rendered.text).map_err(|error| Failure {
            code: error.kind().exit_code(),
            message: error.to_string(),
            hint: Some(error.hint().to_string()),
        })
    }

    pub(crate) fn tokens(&self, text: &str, special: bool) -> Result<Vec<u32>, Failure> {
        let encoding = self.tokenizer.encode(text, special);
        let refused = |message: String| Failure { code: 3, message, hint: None };
        let tokens = encoding.map_err(|error| refused(error.to_string()))?.tokens;
        if tokens.is_empty() {
            return Err(Failure::usage("the prompt is empty", "give a prompt of at least one token"));
        }
        match tokens.iter().find(|token| **token as usize >= self.vocabulary) {
            Some(token) => Err(refused(format!(
                "the tokenizer produces token {token}, but the model has {} tokens",
                self.vocabulary
            ))),
            None => Ok(tokens),
        }
    }
}

/// Continues `prompt` until the text ends or `each` returns false: it gets all added tokens
/// whenever there is another. Returns the added tokens.
pub(crate) fn continued<B: Backend>(
    backend: &B,
    built: &Built<B>,
    texts: &Texts,
    profile: Profile,
    prompt: &[u32],
    rule: (Sampling, u32),
    each: &mut dyn FnMut(&[u32]) -> Result<bool, Failure>,
) -> Result<Vec<u32>, Failure> {
    let (sampling, most) = rule;
    let mut session = Session::new(backend, &built.model, &built.parameters, profile);
    let mut next = prompt.to_vec();
    let mut added = Vec::new();
    let room = built.model.positions.min(texts.max_positions);
    while added.len() < most as usize && session.length() + next.len() <= room {
        let logits = session.extend(&next).map_err(|error| RunError::Step(error.into()))?;
        if let Some(value) = logits.iter().find(|value| !value.is_finite()) {
            let message = format!("a logit after {} tokens is {value}", session.length());
            let hint = "the weights are damaged or too large for this model: check where they come from";
            return Err(Failure { code: 5, message, hint: Some(hint.to_string()) });
        }
        let token = sampling.choose(&logits, session.length() as u64);
        if texts.tokenizer.end_of_text_all().contains(&token) {
            break;
        }
        added.push(token);
        if !each(&added)? {
            break;
        }
        next = vec![token];
    }
    Ok(added)
}

/// A text written as its tokens arrive. A character may take several tokens: only whole characters
/// are written, and at the end everything that the tokens form together.
pub(crate) struct Stream<'a, W: Write> {
    tokenizer: &'a Tokenizer,
    out: W,
    /// The text written so far.
    written: String,
}

impl<'a, W: Write> Stream<'a, W> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, out: W) -> Self {
        Self { tokenizer, out, written: String::new() }
    }

    /// Writes a line before the text.
    fn head(&mut self, name: &str) -> std::io::Result<()> {
        writeln!(self.out, "[{name}]")
    }

    /// Writes the text that later tokens cannot change.
    pub(crate) fn add(&mut self, tokens: &[u32]) -> std::io::Result<()> {
        let text = self.tokenizer.decode(tokens);
        // Decoding shows an incomplete character as this one.
        self.write(text.trim_end_matches(char::REPLACEMENT_CHARACTER))
    }

    /// Writes the rest and ends the line; returns the text.
    pub(crate) fn end(mut self, tokens: &[u32]) -> std::io::Result<String> {
        let text = self.tokenizer.decode(tokens);
        self.write(&text)?;
        writeln!(self.out)?;
        self.out.flush()?;
        Ok(text)
    }

    fn write(&mut self, text: &str) -> std::io::Result<()> {
        if let Some(new) = text.strip_prefix(self.written.as_str()).filter(|new| !new.is_empty()) {
            self.out.write_all(new.as_bytes())?;
            self.out.flush()?;
            self.written = text.to_string();
        }
        Ok(())
    }
}

/// Checks the arguments shared by `generate` and `chat`, and opens the tokenizer and template.
pub(crate) fn open(model: &model::Arguments, sampling: &SamplingArguments) -> Result<(Chosen, Texts), Failure> {
    let device = model.options.device.as_deref().unwrap_or("cpu");
    let chosen = Chosen::parse(device, model.options.threads.unwrap_or(0))?;
    sampling.rule()?;
    Ok((chosen, Texts::open(model)?))
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (chosen, texts) = open(&arguments.model, &arguments.sampling)?;
    note_conversations(arguments, &texts);
    let quiet = arguments.model.options.quiet || arguments.json;
    on_device(&chosen, quiet, Generating { arguments, device: chosen.name(), texts: &texts })?
}

struct Generating<'a> {
    arguments: &'a Arguments,
    device: String,
    texts: &'a Texts,
}

impl Job for Generating<'_> {
    type Result = Result<(), Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { arguments, texts, .. } = self;
        let prompts = match &arguments.prompt[..] {
            [] => input::lines(&mut std::io::stdin().lock())?,
            prompts => prompts.to_vec(),
        };
        let tokens = prompts.iter().map(|prompt| self.prompt_tokens(prompt)).collect::<Result<Vec<_>, _>>()?;
        if let Some(long) = tokens.iter().find(|tokens| tokens.len() > texts.max_positions) {
            let message =
                format!("a prompt has {} tokens, but the model has {} positions", long.len(), texts.max_positions);
            return Err(Failure { code: 3, message, hint: Some("shorten the prompt".to_string()) });
        }
        let longest = tokens.iter().map(Vec::len).max().unwrap_or(0) + arguments.sampling.max_tokens as usize;
        let positions = longest.min(texts.max_positions);
        let mut kinds = vec![("text", true)];
        if arguments.compare {
            kinds.insert(0, ("base", false));
        }
        let models = kinds
            .iter()
            .map(|(name, adapted)| Ok((*name, arguments.model.build(&backend, positions, *adapted)?)))
            .collect::<Result<Vec<_>, Failure>>()?;
        let rule = (arguments.sampling.rule()?, arguments.sampling.max_tokens);
        let profile = arguments.model.profile()?;
        let output = |error| Failure::output(&error);
        for (prompt, tokens) in prompts.iter().zip(&tokens) {
            let mut results = Vec::new();
            for (name, built) in &models {
                let mut stream = Stream::new(&texts.tokenizer, std::io::stdout().lock());
                if !arguments.json && models.len() > 1 {
                    stream.head(if *name == "base" { "base" } else { "adapter" }).map_err(output)?;
                }
                let added = continued(&backend, built, texts, profile, tokens, rule, &mut |added| {
                    if !arguments.json {
                        stream.add(added).map_err(output)?;
                    }
                    Ok(true)
                })?;
                if arguments.json {
                    results.push((*name, texts.tokenizer.decode(&added), added));
                } else {
                    stream.end(&added).map_err(output)?;
                }
            }
            if arguments.json {
                print_json(prompt, &self.device, &results).map_err(output)?;
            }
        }
        Ok(())
    }
}

impl Generating<'_> {
    fn prompt_tokens(&self, prompt: &str) -> Result<Vec<u32>, Failure> {
        if self.arguments.chat {
            let text = self.texts.rendered(&[("user".to_string(), prompt.to_string())])?;
            return self.texts.tokens(&text, false);
        }
        self.texts.tokens(prompt, true)
    }
}

fn print_json(prompt: &str, device: &str, results: &[(&str, String, Vec<u32>)]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut value = serde_json::json!({"schema": "isobit.generate/1", "prompt": prompt, "device": device});
    for (name, text, tokens) in results {
        value[*name] = serde_json::json!(text);
        value[format!("{name}_tokens")] = serde_json::json!(tokens);
    }
    writeln!(out, "{value}")?;
    out.flush()
}

/// Notes that the adapter was trained on conversations but the prompt is not one.
fn note_conversations(arguments: &Arguments, texts: &Texts) {
    let (Some(adapter), Some(_), false) = (&arguments.model.options.adapter, &texts.template, arguments.chat) else {
        return;
    };
    if let (false, Some(format)) = (arguments.model.options.quiet, adapter::conversations(adapter)) {
        tell(&format!(
            "note: this adapter was trained on conversations (`{format}`): `--chat` puts the prompt through the chat template \
             as training did"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps the writes between two flushes apart.
    #[derive(Default)]
    struct Pieces(Vec<Vec<u8>>, Vec<u8>);

    impl Write for &mut Pieces {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            let piece = std::mem::take(&mut self.1);
            self.0.push(piece);
            Ok(())
        }
    }

    #[test]
    fn pieces_are_whole_characters() {
        let folder = tempfile::tempdir().expect("folder");
        let tokenizer = include_bytes!("../../training/tests/fixtures/tokenizer.json");
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer).expect("written");
        let tokenizer = Tokenizer::load(folder.path()).expect("a tokenizer");
        let tokens = |text: &str| tokenizer.encode(text, false).expect("encoded").tokens;
        // The last one is cut inside its last character.
        let mut cut = tokens("a🦜");
        cut.pop();
        for tokens in [tokens("Grüße, 世界 🦜!"), tokens(""), cut] {
            let mut pieces = Pieces::default();
            let mut stream = Stream::new(&tokenizer, &mut pieces);
            for count in 1..=tokens.len() {
                stream.add(&tokens[..count]).expect("written");
            }
            let text = stream.end(&tokens).expect("written");
            assert_eq!(text, tokenizer.decode(&tokens));
            let whole: Vec<&str> =
                pieces.0.iter().map(|piece| std::str::from_utf8(piece).expect("whole characters")).collect();
            assert_eq!(whole.concat(), format!("{text}\n"));
            assert!(whole.len() > text.chars().count() / 4, "as it comes: {whole:?}");
            let last = whole.len() - usize::from(text.ends_with(char::REPLACEMENT_CHARACTER)) - 1;
            assert!(whole[..last].iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)), "{whole:?}");
        }
    }
}
