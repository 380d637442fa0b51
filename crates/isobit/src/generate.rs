//! `isobit generate` and `isobit chat`: text from a model, an adapter, or both side by side.

use crate::Failure;
use crate::backend::{Chosen, Job, on_device};
use crate::model;
use crate::train::failed;
use isobit_kernels::Backend;
use isobit_models::{Built, Sampling, Session};
use isobit_numerics::slices::Profile;
use isobit_training::data::{self, Template, Tokenizer};
use isobit_training::prepare::{RunError, model_config};
use std::io::{BufRead, Write};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: model::Arguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// What to continue; several give several texts. Without any, lines of standard input
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Put the prompt through the chat template as a user's message
    #[arg(long)]
    chat: bool,
    /// With an adapter: print the base model's text too
    #[arg(long, requires = "adapter")]
    compare: bool,
    /// Print one JSON object per text
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ChatArguments {
    #[command(flatten)]
    model: model::Arguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
}

#[derive(Clone, Debug, clap::Args)]
struct SamplingArguments {
    /// 0 takes the most likely token every time
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Only the most likely tokens whose probabilities reach this together
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Most tokens to add
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=131_072))]
    max_tokens: u32,
}

impl SamplingArguments {
    fn rule(&self) -> Result<Sampling, Failure> {
        let share = self.top_p > 0.0 && self.top_p <= 1.0;
        if !(share && (0.0..=100.0).contains(&self.temperature)) {
            let message = format!("temperature {} or top-p {} is out of range", self.temperature, self.top_p);
            return Err(Failure::usage(message, "temperature is 0 to 100, top-p above 0 and at most 1"));
        }
        Ok(Sampling { temperature: self.temperature, top_p: self.top_p, seed: self.seed })
    }
}

/// Tokenizer, template and the limits of a model folder.
struct Texts {
    tokenizer: Tokenizer,
    template: Option<Template>,
    max_positions: usize,
    vocabulary: usize,
}

impl Texts {
    fn open(arguments: &model::Arguments) -> Result<Self, RunError> {
        let config = model_config(&arguments.model)?;
        let (tokenizer, template) = data::open(&arguments.model, &data::DataConfig::default().date)?;
        Ok(Self { tokenizer, template, max_positions: config.max_positions, vocabulary: config.vocabulary })
    }

    /// A conversation as the text that an answer continues.
    fn rendered(&self, messages: &[(String, String)]) -> Result<String, Failure> {
        let Some(template) = &self.template else {
            return Err(Failure::usage("the model folder has no chat template", "leave out `--chat`"));
        };
        let list: Vec<_> =
            messages.iter().map(|(role, content)| serde_json::json!({"role": role, "content": content})).collect();
        let row = serde_json::json!({"messages": list}).to_string();
        let rendered = template.render_row(&row, true);
        rendered.map(|rendered| rendered.text).map_err(|error| Failure {
            code: crate::data::code_of(error.kind()),
            message: error.to_string(),
            hint: Some(error.hint().to_string()),
        })
    }

    fn tokens(&self, text: &str, special: bool) -> Result<Vec<u32>, Failure> {
        let encoding = self.tokenizer.encode(text, special);
        let refused = |message: String| Failure { code: 3, message, hint: None };
        let tokens = encoding.map_err(|error| refused(error.to_string()))?.tokens;
        if tokens.is_empty() {
            return Err(Failure::usage("the prompt is empty", "give a prompt of at least one token"));
        }
        match tokens.iter().find(|token| **token as usize >= self.vocabulary) {
            Some(token) => {
                Err(refused(format!("the tokenizer gives token {token}, the model has {}", self.vocabulary)))
            }
            None => Ok(tokens),
        }
    }
}

/// Continues `prompt` until the text ends; gives the added tokens.
fn continued<B: Backend>(
    backend: &B,
    built: &Built<B>,
    texts: &Texts,
    profile: Profile,
    prompt: &[u32],
    rule: (Sampling, u32),
) -> Result<Vec<u32>, Failure> {
    let (sampling, most) = rule;
    let mut session = Session::new(backend, &built.model, &built.parameters, profile);
    let mut next = prompt.to_vec();
    let mut added = Vec::new();
    let room = built.model.positions.min(texts.max_positions);
    while added.len() < most as usize && session.length() + next.len() <= room {
        let logits = session.extend(&next).map_err(|error| failed(&RunError::Step(error.into())))?;
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
        next = vec![token];
    }
    Ok(added)
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let chosen = Chosen::parse(&arguments.model.device, arguments.model.threads)?;
    arguments.sampling.rule()?;
    let texts = Texts::open(&arguments.model).map_err(|error| failed(&error))?;
    on_device(&chosen, Generating { arguments, texts: &texts })?
}

struct Generating<'a> {
    arguments: &'a Arguments,
    texts: &'a Texts,
}

impl Job for Generating<'_> {
    type Result = Result<(), Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { arguments, texts } = self;
        let prompts = if arguments.prompt.is_empty() { lines()? } else { arguments.prompt.clone() };
        let tokens = prompts.iter().map(|prompt| self.prompt_tokens(prompt)).collect::<Result<Vec<_>, _>>()?;
        if let Some(long) = tokens.iter().find(|tokens| tokens.len() > texts.max_positions) {
            let message =
                format!("a prompt has {} tokens, the model has {} positions", long.len(), texts.max_positions);
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
        for (prompt, tokens) in prompts.iter().zip(&tokens) {
            let mut results = Vec::new();
            for (name, built) in &models {
                let added = continued(&backend, built, texts, profile, tokens, rule)?;
                results.push((*name, texts.tokenizer.decode(&added), added));
            }
            print(arguments.json, prompt, &results).map_err(|error| Failure::output(&error))?;
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

fn lines() -> Result<Vec<String>, Failure> {
    std::io::stdin().lock().lines().collect::<Result<_, _>>().map_err(|error| Failure::output(&error))
}

fn print(json: bool, prompt: &str, results: &[(&str, String, Vec<u32>)]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        let mut value = serde_json::json!({"schema": "isobit.generate/1", "prompt": prompt});
        for (name, text, tokens) in results {
            value[*name] = serde_json::json!(text);
            value[format!("{name}_tokens")] = serde_json::json!(tokens);
        }
        writeln!(out, "{value}")?;
    } else if let [(_, text, _)] = results {
        writeln!(out, "{text}")?;
    } else {
        for (name, text, _) in results {
            writeln!(out, "[{}]\n{text}", if *name == "base" { "base" } else { "adapter" })?;
        }
    }
    out.flush()
}

pub(crate) fn chat(arguments: &ChatArguments) -> Result<(), Failure> {
    let chosen = Chosen::parse(&arguments.model.device, arguments.model.threads)?;
    arguments.sampling.rule()?;
    let texts = Texts::open(&arguments.model).map_err(|error| failed(&error))?;
    on_device(&chosen, Chatting { arguments, texts: &texts })?
}

struct Chatting<'a> {
    arguments: &'a ChatArguments,
    texts: &'a Texts,
}

impl Job for Chatting<'_> {
    type Result = Result<(), Failure>;

    /// Every line of standard input is a user's message; the whole conversation is rendered anew for each answer.
    fn run<B: Backend>(self, backend: B) -> Self::Result {
        const POSITIONS_MOST: usize = 4096;
        let Self { arguments, texts } = self;
        let built = arguments.model.build(&backend, texts.max_positions.min(POSITIONS_MOST), true)?;
        let rule = (arguments.sampling.rule()?, arguments.sampling.max_tokens);
        let profile = arguments.model.profile()?;
        let mut messages: Vec<(String, String)> = Vec::new();
        messages.extend(arguments.system.iter().map(|text| ("system".to_string(), text.clone())));
        for line in std::io::stdin().lock().lines() {
            messages.push(("user".to_string(), line.map_err(|error| Failure::output(&error))?));
            let tokens = texts.tokens(&texts.rendered(&messages)?, false)?;
            if tokens.len() >= built.model.positions {
                let message = format!(
                    "the conversation has {} tokens, there is room for {}",
                    tokens.len(),
                    built.model.positions
                );
                return Err(Failure { code: 3, message, hint: Some("start a new conversation".to_string()) });
            }
            let added = continued(&backend, &built, texts, profile, &tokens, rule)?;
            let answer = texts.tokenizer.decode(&added);
            let mut out = std::io::stdout().lock();
            writeln!(out, "{answer}").and_then(|()| out.flush()).map_err(|error| Failure::output(&error))?;
            messages.push(("assistant".to_string(), answer));
        }
        Ok(())
    }
}
