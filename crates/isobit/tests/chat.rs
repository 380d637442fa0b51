//! `isobit chat` with its messages on a pipe: each line an answer, the conversation so far in front of it, and an end without an error.

mod model_folder;

use model_folder::{Folder, Ran, Shape, finished};
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
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", ""));
    let long = "1+2= ".repeat(600);
    chat(&folder, long.as_bytes(), &[]).says(3, &["the conversation has", "room for 512"]);
    chat(&folder, b"\xff\xfe\n", &[]).says(7, &["UTF-8"]);
    chat(&folder, b"1\n", &["--model", "model"]).says(2, &["--model"]);
    std::fs::remove_file(folder.path("model/chat_template.jinja")).expect("removed");
    chat(&folder, b"1+2=\n", &[]).says(2, &["no chat template"]);
}
