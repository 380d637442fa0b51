//! `isobit chat`, with its messages on a pipe: each line an answer, the conversation so far in
//! front of it, and an end without an error; and on a terminal, with commands and Ctrl-C.

use crate::model_folder::{Folder, Ran, Shape, finished};
use std::io::Write;
use std::process::{Command, Stdio};

const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

fn folder() -> Folder {
    let folder = Folder::new(Shape::TINY);
    folder.put("model/chat_template.jinja", TEMPLATE);
    folder.trained("run", &["learning_rate=0.1", "lr_scheduler_type=constant", "max_steps=6"]);
    folder
}

fn chat(folder: &Folder, input: &[u8], more: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobit"));
    command.current_dir(folder.path("")).args(["chat", "--model", "model", "--max-tokens", "6"]).args(more);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let mut pipe = child.stdin.take().expect("a pipe");
    // A program that refuses to start closes it.
    let _ = pipe.write_all(input);
    drop(pipe);
    finished(child.wait_with_output().expect("waited"))
}

/// What `generate` makes of a prompt.
fn answer(folder: &Folder, more: &[&str]) -> String {
    let ran = folder.run(&[&["generate", "--model", "model", "--max-tokens", "6", "--json"], more].concat());
    ran.says(0, &[]).json()[0]["text"].as_str().expect("a text").to_string()
}

fn turn(role: &str, content: &str) -> String {
    format!("<|im_start|>{role}\n{content}<|im_end|>\n")
}

#[test]
fn two_turns_are_what_generate_says_to_the_conversation() {
    let folder = folder();
    for (more, system) in [
        (&["--adapter", "run/final"][..], None),
        (&["--system", "Sums only."], Some("Sums only.")),
        (&["--temperature", "1.2", "--seed", "5"], None),
    ] {
        let mut prompt = system.map_or(String::new(), |text| turn("system", text)) + &turn("user", "1+2=");
        let assistant = "<|im_start|>assistant\n";
        let same: Vec<&str> = if system.is_some() { vec![] } else { more.to_vec() };
        let first = answer(&folder, &[&same[..], &["--prompt", &format!("{prompt}{assistant}")]].concat());
        if system.is_none() {
            assert_eq!(answer(&folder, &[&same[..], &["--chat", "--prompt", "1+2="]].concat()), first);
        }
        prompt += &(turn("assistant", &first) + &turn("user", "and 3+4="));
        let second = answer(&folder, &[&same[..], &["--prompt", &format!("{prompt}{assistant}")]].concat());
        let ran = chat(&folder, b"1+2=\nand 3+4=\n", more);
        assert_eq!((ran.code, ran.out), (0, format!("{first}\n{second}\n")), "{}", ran.err);
        // A last line need not end.
        assert_eq!(chat(&folder, b"1+2=", more).out, format!("{first}\n"));
    }
}

#[test]
fn ends_and_refusals() {
    let folder = folder();
    let ran = chat(&folder, b"", &[]);
    let about = "model: 2 layers on cpu, profile x2, up to 512 tokens\n";
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", about));
    let long = "1+2= ".repeat(600);
    chat(&folder, long.as_bytes(), &[]).says(3, &["the conversation has", "the maximum is 512"]);
    chat(&folder, b"\xff\xfe\n", &[]).says(3, &["not UTF-8"]);
    chat(&folder, b"1\n", &["--model", "model"]).says(2, &["--model"]);
    std::fs::remove_file(folder.path("model/chat_template.jinja")).expect("removed");
    chat(&folder, b"1+2=\n", &[]).says(2, &["no chat template"]);
}

#[test]
fn messages_of_several_lines_and_commands() {
    let folder = folder();
    let of = |message: &str| answer(&folder, &["--chat", "--prompt", message]);
    for input in ["1+2=\\\n3+4=\n", "\"\"\"\n1+2=\n3+4=\n\"\"\"\n", "\n1+2=\\\n3+4="] {
        assert_eq!(chat(&folder, input.as_bytes(), &[]).out, format!("{}\n", of("1+2=\n3+4=")), "{input}");
    }
    let ran = chat(&folder, b"1+2=\n/reset\n7+1=\n/nothing\n/quit\n5+5=\n", &[]);
    assert_eq!(ran.out, format!("{}\n{}\n", of("1+2="), of("7+1=")));
    ran.says(0, &["conversation cleared\n", "unknown command /nothing"]);
    chat(&folder, b"/help\n", &[]).says(0, &["/reset", "/quit", "backslash"]);
}

/// `generate` without `--chat` on an adapter that learned conversations says so; on any other it
/// does not.
#[test]
fn a_prompt_that_is_no_conversation() {
    let folder = folder();
    let row = |a: usize| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{a}\"}},{{\"role\":\"assistant\",\"content\":\"{}\"}}]}}\n",
            a + 1
        )
    };
    folder.put("messages.jsonl", (0..12).map(row).collect::<String>());
    let ran = folder.trained("talked", &["datasets.0.path=messages.jsonl", "max_steps=2"]);
    assert!(ran.err.ends_with("next: isobit chat --model model --adapter talked/final\n"), "{}", ran.err);
    let note = "note: this adapter was trained on conversations (`messages`): `--chat` ";
    for (adapter, more, noted) in [
        ("talked", &[][..], true),
        ("talked/final", &[], true),
        ("talked/checkpoint-2", &["--json"], true),
        ("talked", &["--chat"], false),
        ("run", &[], false),
    ] {
        let base = ["generate", "--model", "model", "--max-tokens", "2", "--prompt", "1", "--adapter", adapter];
        let ran = folder.run(&[&base[..], more].concat());
        ran.says(0, &[]);
        assert_eq!(ran.err.contains(note), noted, "{adapter} {more:?}: {}", ran.err);
    }
    // Without a template there is nothing to put a prompt through.
    std::fs::remove_file(folder.path("model/chat_template.jinja")).expect("removed");
    let ran =
        folder.run(&["generate", "--model", "model", "--max-tokens=2", "--prompt", "1", "--adapter", "talked/final"]);
    assert!(ran.code == 0 && ran.err.starts_with("device: ") && !ran.err.contains(note), "{}", ran.err);
}

#[cfg(unix)]
#[test]
fn on_a_terminal() {
    let folder = folder();
    let expected = answer(&folder, &["--adapter", "run/final", "--chat", "--prompt", "1+2="]).replace("\r\n", "\n");
    let mut terminal = crate::terminal::Terminal::start(
        &folder.path(""),
        &["chat", "--model", "model", "--adapter", "run", "--max-tokens", "6"],
    );
    let start = terminal.until("\r\n> ");
    assert_eq!(start, "model with adapter run: 2 layers on cpu, profile x2, up to 512 tokens; type /help for commands");
    terminal.press("1+2=\n");
    terminal.until("1+2=\r\n");
    assert_eq!(terminal.until("\r\n> "), expected);
    // Typed half and given up: the program stays.
    terminal.press("5+");
    terminal.press("\x03");
    terminal.until("/quit or Ctrl-D ends the conversation\r\n> ");
    terminal.press("/reset\n");
    terminal.until("cleared\r\n> ");
    terminal.press("1+2=\n");
    terminal.until("1+2=\r\n");
    assert_eq!(terminal.until("\r\n> "), expected, "as if nothing had been said");
    // Too long a conversation does not stop the program.
    terminal.press("\"\"\"\n");
    for _ in 0..40 {
        terminal.press(&("1+2= ".repeat(20) + "\n"));
    }
    terminal.press("\"\"\"\n");
    terminal.until("the maximum is 512: /reset begins a new one\r\n> ");
    terminal.press("\x04");
    assert_eq!(terminal.code(), 0);
}

/// A model whose answer takes a while.
#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_answer() {
    let folder = Folder::new(Shape { hidden: 256, intermediate: 1024, ..Shape::TINY });
    folder.put("model/chat_template.jinja", TEMPLATE);
    folder.put("model/tokenizer_config.json", "{}");
    let most = ["--max-tokens", "480", "--threads", "1"];
    let mut terminal =
        crate::terminal::Terminal::start(&folder.path(""), &[&["chat", "--model", "model"], &most[..]].concat());
    terminal.until("> ");
    terminal.press("1+2=\n");
    terminal.until("1+2=\r\n");
    std::thread::sleep(std::time::Duration::from_millis(20));
    terminal.press("\x03");
    let part = terminal.until("\r\n(stopped)\r\n> ").replace("^C", "");
    let whole =
        folder.run(&[&["generate", "--model", "model", "--chat", "--prompt", "1+2=", "--json"], &most[..]].concat());
    let whole = whole.says(0, &[]).json()[0]["text"].as_str().expect("a text").to_string();
    assert!(part.len() < whole.len(), "{part}");
    terminal.press("/quit\n");
    assert_eq!(terminal.code(), 0);
}
