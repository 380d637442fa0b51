//! `isobit eval` reads data as the run did that it judges: by the run's config, or by the same
//! arguments.

use crate::model_folder::{Folder, Shape};

/// The loss that `eval` prints, as bits.
fn loss(folder: &Folder, more: &[&str]) -> String {
    let ran = folder.run(&[&["eval", "--model", "model", "--json", "--threads", "1"], more].concat());
    assert_eq!(ran.code, 0, "{more:?}: {}", ran.err);
    ran.json()[0]["loss_bits"].as_str().expect("bits").to_owned()
}

#[test]
fn a_runs_config_gives_the_runs_own_evaluation() {
    let folder = Folder::new(Shape::TINY);
    let renamed = folder.text("data.jsonl").replace("prompt", "question").replace("completion", "answer");
    folder.put("data.jsonl", &renamed);
    let fields = ["training.prompt_field=question", "training.completion_field=answer", "profile=x3"];
    let ran = folder.trained("out", &[&fields[..], &["--json"]].concat());
    let evals: Vec<_> = ran.json().into_iter().filter(|event| event["event"] == "eval").collect();
    let last = evals.last().expect("an evaluation")["loss"].as_f64().expect("a loss");
    let config = ["--config", "out/config.resolved.toml", "--adapter", "out/final"];
    assert_eq!(loss(&folder, &config), format!("{:016x}", last.to_bits()));
    // The model is the run's unless another is named.
    let alone = folder.run(&[&["eval", "--json", "--threads", "1"], &config[..]].concat());
    assert_eq!((alone.code, alone.json()[0]["loss_bits"].clone()), (0, format!("{:016x}", last.to_bits()).into()));
    let other = ["eval", "--model", "nowhere", "--config", "out/config.resolved.toml"];
    folder.run(&other).says(2, &["nowhere"]);
    // The profile is the run's unless another is asked for.
    assert_ne!(loss(&folder, &config), loss(&folder, &[&config[..], &["--profile", "x2"]].concat()));
    // A file goes over the rows held out, and is read with the run's fields.
    let by_config = loss(&folder, &[&config[..], &["--data", "data.jsonl"]].concat());
    let by_hand = ["--adapter", "out/final", "--data", "data.jsonl", "--profile", "x3", "--max-seq-length", "64"];
    let named = ["--prompt-field", "question", "--completion-field", "answer"];
    assert_eq!(by_config, loss(&folder, &[&by_hand[..], &named].concat()));
    folder.run(&["eval", "--model", "model", "--data", "data.jsonl"]).says(3, &["`question`", "prompt_field"]);
    let held = ["eval", "--model", "model", "--config", "out/config.resolved.toml", "--max-seq-length", "32"];
    folder.run(&held).says(2, &["which rows a run holds out depends on how it reads its data"]);
    folder.run(&["eval", "--model", "model"]).says(2, &["--data"]);
    folder.run(&["eval", "--data", "data.jsonl"]).says(2, &["--model"]);
}

#[test]
fn masks_dates_and_variables_are_those_asked_for() {
    let folder = Folder::new(Shape::TINY);
    folder.put(
        "model/chat_template.jinja",
        "{{ strftime_now('%Y') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ mood }}<|im_end|>\n{% endfor %}",
    );
    folder.put(
        "chat.jsonl",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"1\"},{\"role\":\"assistant\",\"content\":\"2\"}]}\n",
    );
    let plain = ["--data", "chat.jsonl"];
    let base = loss(&folder, &plain);
    for more in [&["--assistant-only-loss", "false"][..], &["--date", "1999-01-01"], &["--template-var", "mood=7"]] {
        assert_ne!(loss(&folder, &[&plain[..], more].concat()), base, "{more:?}");
    }
    assert_eq!(loss(&folder, &[&plain[..], &["--date", "2025-12-31", "--device", "cpu"]].concat()), base);
    let config = folder.text("config.toml").replace("[training]", "[training]\nchat_template_kwargs = { mood = 7 }");
    folder.put("config.toml", config);
    assert_eq!(
        loss(&folder, &[&plain[..], &["--config", "config.toml"]].concat()),
        loss(&folder, &[&plain[..], &["--template-var", "mood=7"]].concat())
    );
    folder.run(&["eval", "--model", "model", "--data", "x", "--template-var", "mood"]).says(2, &["there is no `=`"]);
    // The same variable in `generate`: the prompt of the answer differs, and so do the tokens it is
    // made of.
    let prompt = ["generate", "--model", "model", "--chat", "--prompt", "1", "--max-tokens", "1", "--threads", "1"];
    let long = ["--template-var", &format!("mood={}", "7 ".repeat(600))];
    assert_eq!(folder.run(&prompt).code, 0);
    folder.run(&[&prompt[..], &long].concat()).says(3, &["the model has 512 positions"]);
}

#[test]
fn rows_of_tokens_need_no_tokenizer() {
    let folder = Folder::new(Shape::TINY);
    let row = |row: usize| format!("{{\"input_ids\":[{},7,8,{}]}}", row % 9, row % 5);
    folder.put("data.jsonl", (0..40).map(row).collect::<Vec<_>>().join("\n"));
    let with = loss(&folder, &["--data", "data.jsonl"]);
    std::fs::remove_file(folder.path("model/tokenizer.json")).expect("removed");
    std::fs::remove_file(folder.path("model/tokenizer_config.json")).expect("removed");
    assert_eq!(loss(&folder, &["--data", "data.jsonl"]), with);
    folder.trained("out", &[]);
    let check = ["data", "check", "--model", "model", "--data", "data.jsonl"];
    assert_eq!(folder.run(&check).code, 0);
    let shown = folder.run(&["data", "show", "--model", "model", "--data", "data.jsonl", "--rows", "1..3"]);
    assert!(shown.out.contains("row 1 from") && shown.out.contains("row 2 from"), "{}", shown.out);
    // What training refuses, the check refuses.
    folder.put("data.jsonl", "{\"input_ids\":[1,2,352]}\n");
    let want = "`input_ids[2]` is 352, but token ids are below 352 here";
    assert!(folder.run(&check).out.contains(want));
    folder.run(&check).says(3, &["1 of 1 rows cannot be trained on"]);
    folder.train("out2", &[]).says(3, &[want]);
    folder.put("data.jsonl", "{\"text\":\"1\"}\n");
    folder.run(&check).says(2, &["needs the tokenizer", "hint: a model folder"]);
}
