//! Law 6 from the outside: a run killed anywhere, or stopped by a signal, and resumed is the run
//! that nothing happened to.
#![cfg(unix)]

use crate::model_folder::{Folder, Shape, finished, names};
use std::process::{Child, Command};
use std::time::Duration;

/// Long enough to be killed in the middle of.
const LONG: [&str; 5] = ["max_steps=36", "save_steps=4", "eval_steps=5", "logging_steps=1", "save_total_limit=3"];

fn long() -> Folder {
    Folder::new(Shape { hidden: 64, intermediate: 128, rows: 120, ..Shape::TINY })
}

/// Milliseconds that a run of these overrides takes here.
#[expect(clippy::disallowed_types, reason = "when to kill is no part of a result")]
fn measured(folder: &Folder, output: &str, overrides: &[&str]) -> u64 {
    let start = std::time::Instant::now();
    folder.trained(output, overrides);
    start.elapsed().as_millis() as u64
}

/// Kills the run, if it still runs, after so many microseconds; true if it did.
fn killed_after(mut child: Child, microseconds: u64) -> bool {
    std::thread::sleep(Duration::from_micros(microseconds));
    let running = child.try_wait().expect("waited").is_none();
    child.kill().expect("killed");
    let ran = finished(child.wait_with_output().expect("waited"));
    assert!(ran.code == -1 || ran.code == 0, "{}", ran.err);
    running
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill is there");
    assert!(sent.success());
}

/// Waits until the run has come to a step, as its events say, then hands it back.
fn at_step(folder: &Folder, output: &str, overrides: &[&str], step: usize) -> Child {
    let child = folder.training(output, overrides);
    let metrics = folder.path(&format!("{output}/metrics.jsonl"));
    for _ in 0..20_000 {
        let text = std::fs::read_to_string(&metrics).unwrap_or_default();
        if text.lines().count() >= step {
            break;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    child
}

#[test]
fn killed_anywhere_and_resumed() {
    const POINTS: u64 = 16;
    let folder = long();
    let took = measured(&folder, "whole", &LONG) * 1000;
    let mut killed = 0;
    for point in 1..=POINTS {
        let output = format!("killed-{point}");
        killed += u32::from(killed_after(folder.training(&output, &LONG), took * point / (POINTS + 1)));
        let resume = [&LONG[..], &["--resume"]].concat();
        if point % 2 == 0 {
            killed_after(folder.training(&output, &resume), took * (POINTS - point) / (2 * POINTS));
        }
        folder.trained(&output, &resume);
        folder.same("whole", &output);
    }
    assert!(killed >= 8, "only {killed} runs were killed: they ended before");
}

/// Kills while checkpoints of a full run are being written, which is most of the time.
#[test]
fn killed_while_saving_and_resumed() {
    const POINTS: u64 = 10;
    let folder = long();
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").expect("a section");
    folder.put("config.toml", format!("{}[adapter]\ntype = \"full\"\n", &config[..adapter]));
    let overrides =
        ["max_steps=10", "save_steps=1", "eval_steps=2", "save_total_limit=2", "load_best_model_at_end=true"];
    let took = measured(&folder, "whole", &overrides) * 1000;
    for point in 1..=POINTS {
        let output = format!("killed-{point}");
        killed_after(folder.training(&output, &overrides), took * point / (POINTS + 1));
        folder.trained(&output, &[&overrides[..], &["--resume"]].concat());
        folder.same("whole", &output);
    }
}

#[test]
fn stopped_by_a_signal_and_resumed_in_another_way() {
    let folder = long();
    let overrides =
        ["max_steps=36", "save_steps=4", "eval_steps=5", "load_best_model_at_end=true", "save_total_limit=2"];
    folder.trained("whole", &overrides);
    for (name, code, change) in [
        ("-INT", 130, ["threads=2", "training.micro_batch_size=1", "gradient_accumulation_steps=8"]),
        ("-TERM", 143, ["gradient_checkpointing=none", "training.micro_batch_size=8", "gradient_accumulation_steps=1"]),
        ("-HUP", 129, ["gradient_checkpointing=selective", "data_workers=3", "eval.micro_batch_size=1"]),
    ] {
        let output = format!("stopped{name}-{}", change[1].len());
        let child = at_step(&folder, &output, &overrides, 6);
        signal(&child, name);
        let ran = finished(child.wait_with_output().expect("waited"));
        ran.says(code, &["stopped after", "--resume"]);
        let step = folder.pointer(&output, "latest");
        assert!((5..36).contains(&step), "{step}");
        assert!(!folder.has(&format!("{output}/final")));
        folder.trained(&output, &[&overrides[..], &change, &["--resume"]].concat());
        folder.same("whole", &output);
    }
}

/// Later checkpoints are made again with other lines of metrics in between.
#[test]
fn logged_more_often_after_going_back() {
    let folder = long();
    let overrides = ["max_steps=8", "save_steps=2", "eval_strategy=no", "logging_steps=8"];
    folder.trained("seldom", &overrides);
    folder.trained("often", &overrides);
    folder.trained("often", &[&overrides[..], &["logging_steps=3", "--resume-from=checkpoint-2"]].concat());
    let diff = folder.run(&["diff", "seldom/final", "often/final"]);
    assert_eq!((diff.code, diff.out.as_str()), (0, "max=0 nonzero=0\n"), "{}", diff.err);
    assert_ne!(folder.metrics("seldom"), folder.metrics("often"));
}

/// Stopped after every single step, with a limit that a checkpoint too many would push a regular
/// one out of: the folder has what the config asks for and the checkpoint to go on from, and ends
/// as that of a run that was never stopped.
#[test]
fn stopped_again_and_again() {
    let folder = Folder::new(Shape { hidden: 64, intermediate: 128, ..Shape::TINY });
    let overrides = ["max_steps=12", "save_steps=5", "eval_strategy=no", "logging_steps=1", "save_total_limit=1"];
    folder.trained("whole", &overrides);
    assert_eq!(folder.checkpoints("whole"), ["checkpoint-12"]);
    let resume = [&overrides[..], &["--resume"]].concat();
    let (mut stops, mut temporary) = (0, 0);
    loop {
        let lines = std::fs::read_to_string(folder.path("stopped/metrics.jsonl")).unwrap_or_default().lines().count();
        let child = at_step(&folder, "stopped", &resume, lines + 1);
        signal(&child, "-INT");
        let ran = finished(child.wait_with_output().expect("waited"));
        if ran.code == 0 {
            break;
        }
        ran.says(130, &["stopped after"]);
        let step = folder.pointer("stopped", "latest");
        let due = step / 5 * 5;
        let mut expected: Vec<u64> = if due > 0 { vec![due] } else { vec![] };
        expected.extend((step != due).then_some(step));
        assert_eq!(
            folder.checkpoints("stopped"),
            expected.iter().map(|step| format!("checkpoint-{step}")).collect::<Vec<_>>()
        );
        (stops, temporary) = (stops + 1, temporary + u32::from(step != due));
    }
    assert!(stops >= 2 && temporary >= 1, "{stops} {temporary}");
    folder.same("whole", "stopped");
}

#[test]
fn lines_of_metrics_that_span_a_checkpoint() {
    let folder = Folder::new(Shape::TINY);
    let overrides = ["max_steps=12", "save_steps=3", "logging_steps=5"];
    folder.trained("whole", &overrides);
    folder.trained("cut", &overrides);
    // As if killed right after the checkpoint of step 3.
    for step in [6, 9, 12] {
        std::fs::remove_dir_all(folder.path(&format!("cut/checkpoint-{step}"))).expect("removed");
    }
    let latest = folder.text("cut/latest.json").replace("12", "3");
    folder.put("cut/latest.json", latest);
    folder.trained("cut", &[&overrides[..], &["--resume"]].concat());
    folder.same("whole", "cut");
}

/// The first step is the best of this run and is saved only because the run is stopped after it.
#[test]
fn stopped_where_the_best_would_not_be_saved() {
    let folder = Folder::new(Shape::TINY);
    folder.put("letters.jsonl", "{\"prompt\":\"1+1=\",\"completion\":\"qxzjkqxzjkqxzjk\"}\n");
    let overrides = [
        "val_set_size=0",
        "eval.path=letters.jsonl",
        "eval_steps=1",
        "learning_rate=0.1",
        "lr_scheduler_type=constant",
        "warmup_ratio=0",
        "max_steps=100",
        "save_steps=40",
    ];
    folder.trained("whole", &overrides);
    let child = folder.training("stopped", &overrides);
    for _ in 0..200_000 {
        // Signals are listened for by the time the folder is taken.
        if folder.has("stopped/LOCK") {
            break;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    signal(&child, "-TERM");
    finished(child.wait_with_output().expect("waited")).says(143, &["stopped after"]);
    folder.trained("stopped", &[&overrides[..], &["--resume"]].concat());
    folder.same("whole", "stopped");
}

#[test]
fn a_finished_run_resumed_stays_as_it_is() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("whole", &[]);
    folder.trained("twice", &[]);
    folder.trained("twice", &["--resume"]);
    folder.same("whole", "twice");
    // Without anything to resume it starts.
    folder.trained("fresh", &["--resume"]);
    folder.same("whole", "fresh");
}

/// Everything in a run folder, by name.
fn contents(folder: &Folder, run: &str) -> std::collections::BTreeMap<String, Vec<u8>> {
    let mut all = std::collections::BTreeMap::new();
    for name in names(&folder.path(run)) {
        let inner = format!("{run}/{name}");
        if folder.path(&inner).is_dir() {
            all.insert(inner.clone(), Vec::new());
            all.extend(contents(folder, &inner));
        } else {
            all.insert(inner.clone(), std::fs::read(folder.path(&inner)).expect("read"));
        }
    }
    all
}

#[test]
fn a_lost_pointer_is_an_error_with_a_way_out() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("whole", &[]);
    folder.trained("lost", &[]);
    std::fs::remove_file(folder.path("lost/latest.json")).expect("removed");
    let before = contents(&folder, "lost");
    folder.train("lost", &["--resume"]).says(8, &["lost holds checkpoint-12, but no latest.json", "--resume-from"]);
    folder.train("lost", &[]).says(2, &["already holds a run", "--resume"]);
    folder.train("lost", &["--resume-from=checkpoint-7"]).says(2, &["lost has no checkpoint-7"]);
    for other in ["elsewhere/checkpoint-6", "final", "checkpoint-06", "6"] {
        folder.train("lost", &[&format!("--resume-from={other}")]).says(2, &["is not a checkpoint of lost"]);
    }
    assert_eq!(contents(&folder, "lost"), before);
    folder.trained("lost", &["--resume-from=checkpoint-12"]);
    folder.same("whole", "lost");
}

/// Back to an earlier checkpoint: what lies ahead stays, is not pruned, and comes out the same
/// again; killed on the way, the run goes on from where it was sent back to.
#[test]
fn back_to_an_earlier_checkpoint() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("whole", &[]);
    folder.trained("back", &[]);
    folder.trained("back", &["--resume-from=back/checkpoint-3"]);
    folder.same("whole", "back");
    // As if killed before the next checkpoint.
    let latest = folder.text("back/latest.json").replace("12", "3");
    folder.put("back/latest.json", latest);
    folder.trained("back", &["--resume", "save_total_limit=6"]);
    folder.same("whole", "back");
    // One ahead that holds something else is not written over.
    folder.put("back/checkpoint-9/notes.txt", "mine");
    let before = contents(&folder, "back");
    let ran = folder.train("back", &["--resume-from=checkpoint-6"]);
    ran.says(2, &["back/checkpoint-9 holds files that this run did not put there", "move it away"]);
    assert_eq!(contents(&folder, "back"), before);
}

#[test]
fn a_changed_line_of_metrics_is_named() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &[]);
    let path = folder.path("run/metrics.jsonl");
    let good = std::fs::read(&path).expect("read");
    let mut seen = std::collections::BTreeSet::new();
    for at in (7..good.len()).step_by(good.len() / 16) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, &bad).expect("written");
        let line = good[..at].split(|byte| *byte == b'\n').count();
        folder.train("run", &["--resume"]).says(8, &["metrics.jsonl", &format!("line {line}: ")]);
        assert_eq!(std::fs::read(&path).expect("read"), bad);
        seen.insert(line);
    }
    assert!(seen.len() > 8, "{seen:?}");
    std::fs::write(&path, &good).expect("written");
    folder.trained("run", &["--resume"]);
}

/// Checkpoints and results of other programs, in every way they may lie there: refused before
/// anything is written.
#[test]
fn what_others_left_in_the_folder_is_not_touched() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("mine", &[]);
    let make = |run: &str, name: &str| {
        std::fs::create_dir_all(folder.path(&format!("{run}/{name}"))).expect("folder");
        folder.put(&format!("{run}/{name}/pytorch_model.bin"), "weeks of work");
    };
    for name in ["checkpoint-1", "checkpoint-3", "checkpoint-500", "final"] {
        let run = format!("other-{name}");
        make(&run, name);
        let before = contents(&folder, &run);
        for more in [&[][..], &["--resume"], &["save_total_limit=1", "save_steps=1"]] {
            folder.train(&run, more).says(2, &[name, "was not made by Isobit", "choose another `output_dir`"]);
        }
        assert_eq!(contents(&folder, &run), before);
    }
    // A link to a run of ours, and the result of one, are not this run's either.
    std::fs::create_dir(folder.path("linked")).expect("folder");
    std::os::unix::fs::symlink(folder.path("mine/checkpoint-3"), folder.path("linked/checkpoint-3")).expect("linked");
    std::fs::create_dir(folder.path("other")).expect("folder");
    std::fs::rename(folder.path("mine/final"), folder.path("other/final")).expect("moved");
    let before = contents(&folder, "other");
    folder.train("linked", &[]).says(2, &["linked/checkpoint-3"]);
    folder.train("other", &[]).says(2, &["already holds a run"]);
    folder.train("other", &["--resume", "seed=8"]).says(2, &["other/final belongs to a different run"]);
    assert_eq!(contents(&folder, "other"), before);
    assert_eq!(names(&folder.path("linked")), ["checkpoint-3"]);
    // A lock that leads elsewhere.
    std::fs::create_dir(folder.path("lock")).expect("folder");
    std::os::unix::fs::symlink(folder.path("data.jsonl"), folder.path("lock/LOCK")).expect("linked");
    let data = folder.text("data.jsonl");
    folder.train("lock", &[]).says(2, &["lock/LOCK"]);
    assert_eq!(folder.text("data.jsonl"), data);
}

/// Names that a run writes beside its checkpoints, and the folder of a checkpoint on its way.
#[test]
fn other_files_in_the_folder_are_not_touched() {
    let folder = Folder::new(Shape::TINY);
    std::fs::create_dir(folder.path("own")).expect("folder");
    folder.put("own/data.json", r#"{"my":"data"}"#);
    folder.train("own", &[]).says(2, &["own/data.json", "was not made by Isobit"]);
    assert_eq!((folder.text("own/data.json").as_str(), names(&folder.path("own")).len()), (r#"{"my":"data"}"#, 1));
    folder.trained("run", &[]);
    std::fs::create_dir(folder.path("run/.checkpoint-9.partial")).expect("folder");
    folder.put("run/.checkpoint-9.partial/thesis.txt", "years of work");
    folder
        .train("run", &["--resume"])
        .says(2, &[".checkpoint-9.partial", "holds files that do not belong to a checkpoint"]);
    assert_eq!(folder.text("run/.checkpoint-9.partial/thesis.txt"), "years of work");
    std::fs::remove_dir_all(folder.path("run/.checkpoint-9.partial")).expect("removed");
    // A folder of which only the metrics, or only the result, is left.
    let lines = folder.text("run/metrics.jsonl");
    for name in names(&folder.path("run")).iter().filter(|name| name.starts_with("checkpoint-")) {
        std::fs::remove_dir_all(folder.path(&format!("run/{name}"))).expect("removed");
    }
    std::fs::remove_file(folder.path("run/latest.json")).expect("removed");
    std::fs::remove_file(folder.path("run/best.json")).expect("removed");
    folder.train("run", &["--resume"]).says(8, &["run holds final, but no latest.json"]);
    std::fs::remove_dir_all(folder.path("run/final")).expect("removed");
    folder.train("run", &["--resume"]).says(8, &["run holds metrics.jsonl, but no latest.json"]);
    folder.train("run", &[]).says(2, &["run already holds a run"]);
    assert_eq!(folder.text("run/metrics.jsonl"), lines);
}

/// A run that goes on replaces some files: those it has written itself.
#[test]
fn files_of_others_are_not_replaced_when_a_run_goes_on() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &[]);
    for (name, text) in [
        ("best.json", "{\"model\": \"mine\"}"),
        ("config.resolved.toml", "[mine]\nanswer = 42\n"),
        ("data.json", "[1, 2]"),
        ("stopped.json", "no JSON"),
        (".final.partial/thesis.txt", "years of work"),
        (".final.partial/model.safetensors", "not of a run that trains an adapter"),
        (".final.partial", "a file"),
    ] {
        let ours = folder.path(&format!("run/{name}"));
        let before = std::fs::read(&ours).ok();
        std::fs::create_dir_all(ours.parent().expect("a folder")).expect("folder");
        std::fs::write(&ours, text).expect("written");
        let foreign = contents(&folder, "run");
        let shown = format!("run/{}", name.split('/').next().expect("a name"));
        for more in ["--resume", "--resume-from=checkpoint-6"] {
            folder.train("run", &[more]).says(2, &[&shown, "hint: move it away"]);
            assert_eq!(contents(&folder, "run"), foreign, "{name}");
        }
        match before {
            Some(bytes) => std::fs::write(&ours, bytes).expect("written"),
            None => std::fs::remove_file(&ours).expect("removed"),
        }
        let _ = std::fs::remove_dir(folder.path("run/.final.partial"));
    }
    // What this run left behind goes, and a pointer to what is gone is written again.
    std::fs::create_dir(folder.path("run/.final.partial")).expect("folder");
    folder.put("run/.final.partial/adapter_model.safetensors", "half");
    let best = folder.text("run/best.json");
    folder.put("run/best.json", best.replace("checkpoint-", "checkpoint-9").replace("\"step\": ", "\"step\": 9"));
    folder.trained("run", &["--resume"]);
    assert_eq!((folder.text("run/best.json"), folder.has("run/.final.partial")), (best, false));
}

/// A pipe would wait for a writer that never comes.
#[test]
fn metrics_that_are_a_pipe_or_without_checksums() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &[]);
    let lines = folder.text("run/metrics.jsonl");
    let without: Vec<&str> = lines.lines().map(|line| line.split(",\"check\"").next().expect("a line")).collect();
    let first = lines.lines().next().expect("a line");
    let without = format!("{first}\n{}}}\n", without[1..].join("}\n"));
    folder.put("run/metrics.jsonl", without);
    folder.train("run", &["--resume"]).says(8, &["metrics.jsonl", "line 2: its checksum is missing"]);
    std::fs::remove_file(folder.path("run/metrics.jsonl")).expect("removed");
    let made = std::process::Command::new("mkfifo").arg(folder.path("run/metrics.jsonl")).status();
    assert!(made.expect("mkfifo").success());
    folder.train("run", &["--resume"]).says(8, &["metrics.jsonl"]);
}
