//! `--json` and a failure: the last line on stdout is an event with the exit code and the message,
//! whatever went wrong; but a command whose own object says what is wrong prints no second one.

use crate::model_folder::{Folder, Ran, Shape};
use serde_json::Value;

/// The event that a failing command must end with, checked against its exit code and what it says
/// on stderr.
#[track_caller]
fn error_event(ran: &Ran, code: i32) -> Value {
    assert_eq!(ran.code, code, "{}{}", ran.out, ran.err);
    let event = ran.json().pop().expect("a line");
    assert_eq!((&event["schema"], &event["event"]), (&"isobit.error/1".into(), &"error".into()), "{event}");
    assert_eq!(event["exit"], code, "{event}");
    let message = event["message"].as_str().expect("a message");
    assert!(!message.is_empty() && ran.err.contains(&format!("error: {message}")), "{event}: {}", ran.err);
    event
}

#[test]
fn failures_are_events() {
    let folder = Folder::new(Shape::TINY);
    folder.put("bad.jsonl", "{\"prompt\":\n");
    let data = "datasets.0.path=bad.jsonl";
    for (arguments, code) in [
        (&["train", "config.toml", "--json", "--set", data][..], 3),
        (&["train", "config.toml", "--json", "--set", "seed=-1"], 2),
        (&["train", "nowhere.toml", "--json"], 2),
        (&["plan", "nowhere.toml", "--json"], 2),
        (&["plan", "config.toml", "--json", "--device", "cuda:63"], 6),
        (&["eval", "--json", "--model", "model", "--data", "bad.jsonl"], 3),
        (&["generate", "--json", "--model", "nowhere", "--prompt", "1"], 2),
        (&["diff", "--json", "nowhere", "nowhere"], 2),
        (&["data", "show", "--json", "--model", "model", "--data", "data.jsonl", "--row", "99"], 2),
        (&["bench", "step", "--json", "--config", "nowhere.toml"], 2),
        (&["bench", "kernels", "--json", "--profile", "x9"], 2),
        // Usage, which no command gets to see.
        (&["plan", "--json", "--nonsense", "config.toml"], 2),
        (&["diff", "--json", "one"], 2),
    ] {
        let ran = folder.run(arguments);
        assert_eq!(ran.json().len(), 1, "{arguments:?}: {}", ran.out);
        error_event(&ran, code);
        let plain: Vec<&str> = arguments.iter().copied().filter(|word| *word != "--json").collect();
        let ran = folder.run(&plain);
        assert_eq!((ran.code, ran.out.as_str()), (code, ""), "{plain:?}: results only without `--json`");
    }
    let ran = folder.run(&["generate", "--json", "--model", "model", "--prompt", ""]);
    assert_eq!(error_event(&ran, 2)["hint"], "give a prompt of at least one token");
    // After `--` it is the name of a file.
    let ran = folder.run(&["diff", "--", "--json", "nowhere"]);
    assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{}", ran.err);
}

/// The events of a run that fails in the middle end with it.
#[test]
fn a_run_that_fails_ends_with_the_event() {
    let folder = Folder::new(Shape::TINY);
    let ran = folder.train("out", &["weight_decay=1e30", "--json"]);
    let events = ran.json();
    assert_eq!((&events[0]["event"], &events[0]["schema"]), (&"started".into(), &"isobit.train/1".into()));
    let message = error_event(&ran, 5)["message"].clone();
    assert!(message.as_str().is_some_and(|message| message.contains("step 2")), "{message}");
}

/// What a command was asked for is printed once: an object that says what is wrong is no failure to
/// report again.
#[test]
fn results_that_end_with_another_code_stand_alone() {
    let folder = Folder::new(Shape::TINY);
    folder.put("bad.jsonl", folder.text("data.jsonl") + "{\"prompt\":\n");
    folder.trained("first", &["max_steps=1"]);
    folder.trained("second", &["max_steps=1", "seed=8"]);
    for (arguments, code, schema) in [
        (&["plan", "config.toml", "--json", "--memory", "0.0001"][..], 4, "isobit.plan/1"),
        (&["data", "check", "--json", "--model", "model", "--data", "bad.jsonl"], 3, "isobit.data-check/1"),
        (&["diff", "--json", "first", "second"], 1, "isobit.diff/1"),
    ] {
        let ran = folder.run(arguments);
        let lines = ran.json();
        assert_eq!((ran.code, lines.len()), (code, 1), "{arguments:?}: {}", ran.out);
        assert_eq!(lines[0]["schema"], schema);
    }
}
