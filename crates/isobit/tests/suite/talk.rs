//! What `isobit train` says: plain lines where there is no terminal, the end of a run for people
//! and for programs, runs that came to nothing, and what a signal is answered with.

use crate::model_folder::{Folder, Shape, put_tensors, weights};
use isobit_proof::hash::Hash;

/// Lines of standard error that begin so.
fn lines<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    text.lines().filter(|line| line.starts_with(start)).collect()
}

fn hash(folder: &Folder, file: &str) -> String {
    Hash::of_file(&folder.path(file)).expect("hashed").to_string()[..32].to_string()
}

/// What the metrics say: of every line that has the field, step and value.
fn values(folder: &Folder, run: &str, field: &str) -> Vec<(u64, f64)> {
    let number = |line: &serde_json::Value| {
        let bits = u64::from_str_radix(line[format!("{field}_bits")].as_str()?, 16).expect("digits");
        Some((line["step"].as_u64()?, f64::from_bits(bits)))
    };
    folder.metrics(run).iter().filter_map(|line| number(&serde_json::from_str(line).expect("JSON"))).collect()
}

/// A run with one line of metrics has one loss.
#[test]
fn a_single_loss_is_said_once() {
    let folder = Folder::new(Shape::TINY);
    let ran = folder.trained("out", &["max_steps=1", "logging_steps=1"]);
    let line = ran.err.lines().find(|line| line.starts_with("  loss ")).expect("a loss");
    assert_eq!(line.matches("at step").count(), 1, "{line}");
}

#[test]
fn a_log_file_lives() {
    let folder = Folder::new(Shape::TINY);
    let ran = folder.trained("out", &["logging_steps=5"]);
    assert_eq!(ran.out, "");
    // Twelve updates: every fifth and the last.
    let logged: Vec<String> = values(&folder, "out", "loss")
        .iter()
        .map(|(step, loss)| format!("step {step}/12: loss {loss:.4}, lr "))
        .collect();
    assert_eq!(logged.len(), 3);
    for (line, start) in lines(&ran.err, "step ").iter().filter(|line| !line.contains("eval")).zip(&logged) {
        assert!(line.starts_with(start) && line.contains(" tokens/s, eta "), "{line}");
    }
    let evals = values(&folder, "out", "eval_loss");
    let told: Vec<&str> = lines(&ran.err, "step ").into_iter().filter(|line| line.contains("eval loss")).collect();
    assert_eq!((evals.len(), told.len()), (3, 3));
    for ((step, loss), line) in evals.iter().zip(told) {
        assert!(line.starts_with(&format!("step {step}/12: eval loss {loss:.4}, perplexity ")), "{line}");
    }
    // Resumed after its end, a run says where it stood.
    let ran = folder.trained("out", &["logging_steps=5", "--resume"]);
    assert_eq!(lines(&ran.err, "resuming after 12 of 12 updates").len(), 1, "{}", ran.err);
    let quiet = folder.trained("quiet", &["-q"]);
    assert_eq!((quiet.out.as_str(), quiet.err.as_str()), ("", ""));
}

#[test]
fn the_end_of_a_run() {
    let folder = Folder::new(Shape::TINY);
    let ran = folder.trained("my out", &["load_best_model_at_end=true"]);
    let (losses, evals) = (values(&folder, "my out", "loss"), values(&folder, "my out", "eval_loss"));
    let best = evals.iter().copied().reduce(|best, eval| if eval.1 < best.1 { eval } else { best }).expect("some");
    assert_eq!(best.0, folder.pointer("my out", "best"));
    let end: Vec<&str> = ran.err.lines().skip_while(|line| !line.starts_with("finished ")).collect();
    assert!(
        end[0].starts_with("finished after 12 updates in ") && end[0].contains(" tokens/s in updates; peak memory "),
        "{end:?}"
    );
    let [first, last] = [losses[0].1, losses[11].1];
    let expected = [
        format!("  loss {first:.4} at step 1, {last:.4} at step 12; best evaluation {:.4} at step {}", best.1, best.0),
        format!("  weights in my out/final: those of checkpoint-{}, the last and the best", best.0),
        format!("  adapter {}", hash(&folder, "my out/final/adapter_model.safetensors")),
        "next: isobit generate --model model --adapter 'my out/final' --compare --prompt \"...\"".to_string(),
    ];
    assert_eq!(end[1..], expected);
    assert!(!ran.err.contains("warning"), "{}", ran.err);

    // The same for programs, and with the last weights.
    let ran = folder.trained("other", &["--json", "lora_dropout=0"]);
    assert!(!ran.err.contains("step 1/12"), "events are enough: {}", ran.err);
    let (losses, evals) = (values(&folder, "other", "loss"), values(&folder, "other", "eval_loss"));
    let best = evals.iter().copied().reduce(|best, eval| if eval.1 < best.1 { eval } else { best }).expect("some");
    let events = ran.json();
    assert!(events.iter().all(|event| event["schema"] == "isobit.train/1"));
    let end = events.last().expect("events");
    assert_eq!(
        (&end["event"], &end["step"], &end["verdict"], &end["folder"], &end["checkpoint"]),
        (&"finished".into(), &12.into(), &"ok".into(), &"other/final".into(), &"checkpoint-12".into())
    );
    assert_eq!(end["hash"], hash(&folder, "other/final/adapter_model.safetensors"));
    assert_eq!((&end["first_loss"], &end["last_loss"]), (&losses[0].1.into(), &losses[11].1.into()));
    assert_eq!((&end["best_eval_loss"], &end["best_eval_step"]), (&best.1.into(), &best.0.into()));
    let tokens = events.iter().filter(|event| event["event"] == "step").map(|step| step["tokens"].as_u64());
    assert_eq!(end["tokens"].as_u64(), tokens.sum());
    for figure in ["seconds", "tokens_per_s", "peak_memory_bytes"] {
        assert!(end[figure].as_f64().is_some_and(|value| value > 0.0), "{figure}: {end}");
    }
    // A run that was finished before has the same end, but for what a clock says.
    let again = folder.trained("other", &["--json", "lora_dropout=0", "--resume"]).json();
    let again = again.last().expect("events");
    for field in ["hash", "first_loss", "last_loss", "best_eval_loss", "checkpoint", "verdict"] {
        assert_eq!(again[field], end[field], "{field}");
    }
    assert_eq!((&again["tokens"], &again["tokens_per_s"]), (&0.into(), &serde_json::Value::Null));
}

/// The hash of weights that are no adapter, and how to go on with them.
#[test]
fn the_end_of_a_full_run() {
    let folder = full();
    let ran = folder.trained("out", &["max_steps=2"]);
    let expected = format!("  weights {}\n", hash(&folder, "out/final/model.safetensors"));
    assert!(ran.err.contains(&expected), "{}", ran.err);
    assert!(ran.err.ends_with("next: isobit generate --model out/final --prompt \"...\"\n"), "{}", ran.err);
}

#[test]
fn runs_that_came_to_nothing() {
    // Behind a norm whose weights are zero, every logit and every gradient is zero.
    let folder = Folder::new(Shape::TINY);
    let mut tensors = weights(folder.shape, 1);
    tensors.iter_mut().filter(|(name, ..)| name == "model.norm.weight").for_each(|(.., values)| values.fill(0.0));
    put_tensors(&folder.path("model/model.safetensors"), &tensors);
    came_to(&folder, &[], "dead", "this run is dead: its last gradient is zero, at a loss of 5.8636; ");
    let ran = folder.trained("warned", &[]);
    assert_eq!(lines(&ran.err, "warning: step ").len(), 1, "once: {}", ran.err);
    assert!(ran.err.contains("warning: step 1: the gradient is zero"), "{}", ran.err);

    let folder = full();
    let hot = ["learning_rate=1", "max_grad_norm=0", "lr_scheduler_type=constant", "warmup_ratio=0"];
    came_to(&folder, &hot, "exploded", "this run exploded: its loss went from 5.8474 to ");
}

#[track_caller]
fn came_to(folder: &Folder, overrides: &[&str], verdict: &str, said: &str) {
    let ran = folder.trained(verdict, overrides);
    assert!(ran.err.contains(&format!("warning: {said}")), "{}", ran.err);
    assert!(
        ran.err.contains("uniform guessing over 352 tokens gives 5.8636\nhint: lower `learning_rate`"),
        "{}",
        ran.err
    );
    let end = folder.trained(&format!("{verdict}-json"), &[overrides, &["--json"]].concat()).json();
    assert_eq!(end.last().expect("events")["verdict"], verdict);
}

/// A folder whose config trains all weights.
fn full() -> Folder {
    let folder = Folder::new(Shape::TINY);
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").expect("a section");
    folder.put("config.toml", format!("{}[adapter]\ntype = \"full\"\n", &config[..adapter]));
    folder
}

#[test]
fn the_device_of_the_command_line() {
    let folder = Folder::new(Shape::TINY);
    folder.train("out", &["--device", "opencl:999"]).says(2, &["--device"]);
    let ran = folder.run(&["train", "config.toml", "--device", "opencl:999"]);
    ran.says(6, &["opencl:999", "isobit devices"]);
    folder
        .run(&["train", "config.toml", "--device", "gpu"])
        .says(2, &["not a device", "hint: cpu, opencl:0, cuda:0, hip:0 or auto;"]);
    assert!(!folder.has("out"));
    let config = folder.text("config.toml").replace("threads = 1", "threads = 1\ndevice = \"opencl:999\"");
    folder.put("config.toml", config);
    folder.run(&["train", "config.toml", "--device", "cpu", "--set", "max_steps=1"]).says(0, &[]);
}

#[test]
fn exit_codes_are_in_the_help_and_in_the_manual() {
    let folder = Folder::new(Shape::TINY);
    for command in ["--help", "man"] {
        let ran = folder.run(&[command]);
        assert!(ran.code == 0 && ran.out.contains("9 stopped at once by a second signal"), "{}", ran.out);
    }
}

#[cfg(unix)]
mod signals {
    use super::*;
    use crate::model_folder::{Ran, finished};
    use std::process::Command;
    use std::time::Duration;

    /// Sends these signals as soon as the run has logged a line more than `lines`, and waits for
    /// its end.
    fn signalled(folder: &Folder, overrides: &[&str], lines: usize, signals: &str) -> Ran {
        let child = folder.training("out", overrides);
        let metrics = folder.path("out/metrics.jsonl");
        for _ in 0..20_000 {
            if std::fs::read_to_string(&metrics).unwrap_or_default().lines().count() > lines {
                break;
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        let sent = Command::new("sh").args(["-c", &signals.replace("PID", &child.id().to_string())]).status();
        assert!(sent.expect("a shell").success());
        finished(child.wait_with_output().expect("waited"))
    }

    /// Two different signals: two of the same kind may arrive as one. A step takes far longer than
    /// from one to the other.
    #[test]
    fn one_saves_and_two_do_not() {
        let shape = Shape { hidden: 256, intermediate: 512, ..Shape::TINY };
        let overrides = ["max_steps=400", "save_steps=1000", "eval_strategy=no", "--resume"];
        let folder = Folder::new(shape);
        let ran = signalled(&folder, &overrides, 0, "kill -INT PID; kill -TERM PID");
        ran.says(9, &["stopped now: nothing of this run was saved\n"]);
        assert!(!ran.err.contains("error:") && !folder.has("out/checkpoint-1"), "{}", ran.err);

        // In a folder of its own: lines that the run above left would be counted as new ones.
        let folder = Folder::new(shape);
        let ran = signalled(&folder, &overrides, 1, "kill -INT PID");
        let step = folder.pointer("out", "latest");
        let stopped = format!("stopped after {step} updates by Ctrl-C, saved in out/checkpoint-{step}\n");
        ran.says(130, &["finishing this step and saving; Ctrl-C again to stop now\n", &stopped, "`--resume`"]);
        assert!(!ran.err.contains("error:") && !ran.err.contains("hint:"), "{}", ran.err);

        let ran = signalled(&folder, &overrides, step as usize, "kill -INT PID; kill -TERM PID");
        ran.says(9, &[&format!("stopped now: nothing since checkpoint {step} was saved\n")]);
        assert_eq!(folder.pointer("out", "latest"), step);
        assert!(ran.err.contains(&format!("resuming after {step} of 400 updates")), "{}", ran.err);
    }

    /// An evaluation cannot be left: its result belongs to the update.
    #[test]
    fn a_signal_during_an_evaluation_says_that_it_ends_first() {
        let shape = Shape { hidden: 256, intermediate: 512, ..Shape::TINY };
        let folder = Folder::new(shape);
        folder.put("long.jsonl", crate::model_folder::rows(30_000));
        let evaluates = ["eval.path=long.jsonl", "eval_strategy=steps", "eval_steps=2", "eval.micro_batch_size=1"];
        let overrides = [&["max_steps=4", "save_steps=1", "logging_steps=1", "--resume"], &evaluates[..]].concat();
        let kept = "an evaluation is running: the update is saved when it ends; a second signal stops now with \
                    checkpoint-1 kept\n";
        // The line of the second update comes right before its evaluation.
        let ran = signalled(&folder, &overrides, 1, "sleep 0.3; kill -TERM PID; sleep 0.1; kill -INT PID");
        ran.says(9, &[kept, "stopped now: nothing since checkpoint 1 was saved\n"]);
        assert!(!ran.err.contains("finishing this step"), "{}", ran.err);
    }
}
