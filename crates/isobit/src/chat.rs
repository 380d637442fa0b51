//! `isobit chat`: a conversation with a model. On a terminal there is a prompt, answers appear
//! token by token, and Ctrl-C ends the answer, not the program. On a pipe every line is a message,
//! and stdout receives only the answers.

use crate::Failure;
use crate::backend::{Job, on_device};
use crate::generate::{SamplingArguments, Stream, Texts, continued, open};
use crate::stderr::tell;
use crate::{input, model};
use isobit_kernels::Backend;
use isobit_models::{Built, Sampling};
use isobit_numerics::slices::Profile;
use isobit_training::signal;
use std::io::{BufRead, IsTerminal, Write};

#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: model::Arguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// System message that precedes the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
}

/// The text of `/help`, and the end of `--help`.
const HELP: &str = "\
/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C ends an answer.
A line that ends in a backslash continues on the next; \"\"\" begins and ends a message of several lines.";

/// BOUND: positions that caches are allocated for.
const POSITIONS_MAX: usize = 4096;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (chosen, texts) = open(&arguments.model, &arguments.sampling)?;
    texts.needs_template("use `isobit generate`, which continues a text as it stands")?;
    // The first line says which device it is.
    on_device(&chosen, true, Chatting { arguments, device: chosen.name(), texts: &texts })?
}

struct Chatting<'a> {
    arguments: &'a Arguments,
    device: String,
    texts: &'a Texts,
}

impl Job for Chatting<'_> {
    type Result = Result<(), Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let Self { arguments, device, texts } = self;
        let built = arguments.model.build(&backend, texts.max_positions.min(POSITIONS_MAX), true)?;
        let terminal = std::io::stdin().is_terminal();
        if terminal {
            signal::install_for_conversation().map_err(|error| Failure::output(&error))?;
        }
        if !arguments.model.options.quiet {
            tell(&about(&arguments.model, &device, &built, terminal));
        }
        let system = arguments.system.iter().map(|text| ("system".to_string(), text.clone())).collect();
        let rule = (arguments.sampling.rule()?, arguments.sampling.max_tokens);
        let profile = arguments.model.profile()?;
        let mut conversation =
            Conversation { backend: &backend, built: &built, texts, profile, rule, terminal, messages: system };
        conversation.hold(&mut std::io::stdin().lock())
    }
}

/// The first line shown.
fn about<B: Backend>(model: &model::Arguments, device: &str, built: &Built<B>, terminal: bool) -> String {
    let name = model.model.file_name().map_or(model.model.as_os_str(), |name| name).to_string_lossy();
    let adapter =
        model.options.adapter.as_ref().map_or(String::new(), |folder| format!(" with adapter {}", folder.display()));
    let help = if terminal { "; type /help for commands" } else { "" };
    format!(
        "{name}{adapter}: {} layers on {}, profile {}, up to {} tokens{help}",
        built.model.config.layers.len(),
        device,
        model.profile_name(),
        built.model.positions
    )
}

struct Conversation<'a, B: Backend> {
    backend: &'a B,
    built: &'a Built<B>,
    texts: &'a Texts,
    profile: Profile,
    rule: (Sampling, u32),
    terminal: bool,
    /// Role and content.
    messages: Vec<(String, String)>,
}

impl<B: Backend> Conversation<'_, B> {
    fn hold(&mut self, reader: &mut impl BufRead) -> Result<(), Failure> {
        while let Some(message) = next_message(reader, self.terminal)? {
            match message.trim() {
                "" => (),
                "/quit" | "/exit" => break,
                "/help" => tell(HELP),
                "/reset" => {
                    self.messages.retain(|(role, _)| role == "system");
                    tell("conversation cleared");
                }
                word if is_command(word) => tell(&format!("unknown command {word}; type /help for commands")),
                _ => self.answer(message)?,
            }
        }
        Ok(())
    }

    /// Renders the whole conversation again for each answer: a template may treat its last message
    /// specially.
    fn answer(&mut self, message: String) -> Result<(), Failure> {
        self.messages.push(("user".to_string(), message));
        let tokens = self.texts.tokens(&self.texts.rendered(&self.messages)?, false)?;
        let most = self.built.model.positions;
        if tokens.len() >= most {
            let message = format!("the conversation has {} tokens; the maximum is {most}", tokens.len());
            if !self.terminal {
                return Err(Failure { code: 3, message, hint: Some("start a new conversation".to_string()) });
            }
            self.messages.pop();
            tell(&format!("{message}: /reset begins a new one"));
            return Ok(());
        }
        // Discard a Ctrl-C pressed while the user was typing.
        signal::interrupted();
        let mut stream = Stream::new(&self.texts.tokenizer, std::io::stdout().lock());
        let mut stopped = false;
        let added = continued(self.backend, self.built, self.texts, self.profile, &tokens, self.rule, &mut |added| {
            stream.add(added).map_err(|error| Failure::output(&error))?;
            stopped = self.terminal && signal::interrupted();
            Ok(!stopped)
        })?;
        let answer = stream.end(&added).map_err(|error| Failure::output(&error))?;
        if stopped {
            tell("(stopped)");
        }
        self.messages.push(("assistant".to_string(), answer));
        Ok(())
    }
}

/// A slash and one word of letters, nothing else: a path or a fraction is a message.
fn is_command(text: &str) -> bool {
    let word = text.strip_prefix('/');
    word.is_some_and(|word| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase()))
}

/// One line, lines joined by a backslash, or the text between two `"""`. None at the end of the
/// input. On a terminal Ctrl-C discards an unfinished message of several lines, and Ctrl-D inside
/// one ends the conversation.
fn next_message(reader: &mut impl BufRead, terminal: bool) -> Result<Option<String>, Failure> {
    const QUOTES: &str = "\"\"\"";
    let Some(mut line) = prompted(reader, terminal, "> ")? else { return Ok(None) };
    signal::interrupted();
    let mut message = String::new();
    let mut quoted = false;
    loop {
        if message.is_empty() && !quoted {
            quoted = line.trim_start().starts_with(QUOTES);
            message = if quoted { line.trim_start()[QUOTES.len()..].to_string() } else { line };
        } else {
            message.push('\n');
            message.push_str(&line);
        }
        if quoted {
            if let Some(whole) = message.trim_end().strip_suffix(QUOTES) {
                return Ok(Some(whole.trim_matches('\n').to_string()));
            }
        } else if message.ends_with('\\') {
            message.pop();
        } else {
            return Ok(Some(message));
        }
        match prompted(reader, terminal, ". ")? {
            None => return Ok((!terminal).then_some(message)),
            Some(next) => line = next,
        }
        if terminal && signal::interrupted() {
            (message, quoted) = (String::new(), false);
        }
    }
}

fn prompted(reader: &mut impl BufRead, terminal: bool, prompt: &str) -> Result<Option<String>, Failure> {
    if !terminal {
        return input::line(reader);
    }
    let mut err = std::io::stderr().lock();
    let _ = write!(err, "{prompt}").and_then(|()| err.flush());
    drop(err);
    signal::waiting(true);
    let line = input::line(reader);
    signal::waiting(false);
    if let Ok(None) = line {
        // Ctrl-D leaves the cursor after the prompt.
        tell("");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<String> {
        let mut reader = text.as_bytes();
        let mut all = Vec::new();
        while let Some(message) = next_message(&mut reader, false).expect("text") {
            all.push(message);
        }
        all
    }

    #[test]
    fn messages_of_one_line_and_of_several() {
        assert_eq!(messages("a\nb"), ["a", "b"]);
        assert_eq!(messages("a\\\n b\\\nc\nd\n"), ["a\n b\nc", "d"]);
        assert_eq!(messages("a\\"), ["a"], "the input may end anywhere");
        assert_eq!(messages("\"\"\"\none\n\n  two\n\"\"\"\nthree\n"), ["one\n\n  two", "three"]);
        assert_eq!(messages("\"\"\"one\ntwo\"\"\"\n"), ["one\ntwo"]);
        assert_eq!(messages("\"\"\"one\"\"\"\n\"\"\"\ntwo"), ["one", "\ntwo"]);
    }

    #[test]
    fn commands_are_single_words() {
        for (text, command) in [("/reset", true), ("/x", true), ("/", false), ("/etc/passwd", false), ("/a b", false)] {
            assert_eq!(is_command(text), command, "{text}");
        }
    }
}
