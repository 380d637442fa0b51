//! Checkpoints of a run folder: what is saved comes back on bits, and nothing damaged or foreign is
//! taken for it.

use isobit_proof::safetensors::NamedTensor;
use isobit_training::checkpoint::{
    Error, Identity, Latest, Progress, Snapshot, Start, begin, best, clean, examine, folder_of, go_back_to, inspect,
    latest, load, mark_best, prune, put_adapter, replace_final, restore_best, save,
};
use std::fs;
use std::path::Path;

fn identity() -> Identity {
    Identity {
        run: "a".repeat(64),
        data: "b".repeat(64),
        base: "c".repeat(64),
        profile: "x2".to_string(),
        numerics: "isobit-1".to_string(),
        start: None,
        load_in_4bit: None,
    }
}

fn snapshot(step: u64) -> Snapshot {
    let values = [0.0, -0.0, 1e-40, f32::MAX, f32::from_bits(0x7fc0_0001), step as f32];
    let tensor = |name: &str| NamedTensor { name: name.to_string(), shape: vec![3, 2], values: values.to_vec() };
    let mut progress = Progress::start(identity());
    progress.step = step;
    progress.rows_seen = 8 * step;
    Snapshot {
        step,
        weights: vec![tensor("model.a"), tensor("model.b")],
        moments1: vec![tensor("model.b")],
        moments2: vec![tensor("model.b")],
        progress,
    }
}

fn check_same(found: &Snapshot, expected: &Snapshot) {
    let parts = |snapshot: &Snapshot| {
        [&snapshot.weights, &snapshot.moments1, &snapshot.moments2].map(|tensors| {
            let tensor = |tensor: &NamedTensor| {
                (
                    tensor.name.clone(),
                    tensor.shape.clone(),
                    tensor.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                )
            };
            tensors.iter().map(tensor).collect::<Vec<_>>()
        })
    };
    assert_eq!((found.step, &found.progress), (expected.step, &expected.progress));
    assert_eq!(parts(found), parts(expected));
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("folder")
        .map(|entry| entry.expect("entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_saved_comes_back_on_bits() {
    let folder = tempfile::tempdir().expect("folder");
    assert_eq!(latest(folder.path()).expect("readable"), Latest::Missing);
    begin(folder.path()).expect("begun");
    assert_eq!(latest(folder.path()).expect("readable"), Latest::Begun);
    let adapter = serde_json::json!({"peft_type": "LORA", "lora_alpha": 16});
    for (step, config) in [(5, None), (7, Some(&adapter))] {
        let saved = save(folder.path(), &snapshot(step), config).expect("saved");
        assert_eq!(latest(folder.path()).expect("readable"), Latest::At(step));
        check_same(&load(&saved, &identity()).expect("whole"), &snapshot(step));
    }
    assert_eq!(
        names(&folder_of(folder.path(), 5)),
        ["MANIFEST.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    );
    assert_eq!(
        names(&folder_of(folder.path(), 7)),
        ["MANIFEST.json", "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "state.json"]
    );
    // The folder can be moved.
    let moved = tempfile::tempdir().expect("folder");
    let target = moved.path().join("run");
    fs::rename(folder.path(), &target).expect("moved");
    assert_eq!(latest(&target).expect("readable"), Latest::At(7));
    assert_eq!(inspect(&folder_of(&target, 7)).expect("whole").step, 7);
}

#[test]
fn the_same_step_again_must_be_the_same_bytes() {
    let folder = tempfile::tempdir().expect("folder");
    let saved = save(folder.path(), &snapshot(5), None).expect("saved");
    let manifest = fs::read(saved.join("MANIFEST.json")).expect("read");
    save(folder.path(), &snapshot(5), None).expect("the same");
    assert_eq!(fs::read(saved.join("MANIFEST.json")).expect("read"), manifest);

    let mut other = snapshot(5);
    other.weights[0].values[0] = 1.0;
    let error = save(folder.path(), &other, None).expect_err("other bytes");
    assert!(matches!(&error, Error::Exists { file, .. } if file == "model.safetensors"), "{error}");
    check_same(&load(&saved, &identity()).expect("whole"), &snapshot(5));

    // A damaged one is replaced.
    fs::write(saved.join("state.json"), "{}").expect("written");
    assert_eq!(load(&saved, &identity()).expect_err("damaged").exit_code(), 8);
    save(folder.path(), &other, None).expect("replaced");
    check_same(&load(&saved, &identity()).expect("whole"), &other);
    assert_eq!(names(folder.path()), ["checkpoint-5", "latest.json"]);
}

#[test]
fn damage_is_found_and_named() {
    let folder = tempfile::tempdir().expect("folder");
    for file in ["model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"] {
        let saved = save(folder.path(), &snapshot(5), None).expect("saved");
        let path = saved.join(file);
        let good = fs::read(&path).expect("read");
        for at in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).expect("written");
            let error = load(&saved, &identity()).expect_err(file);
            assert!(error.exit_code() == 8 || file == "MANIFEST.json", "{error}");
            assert!(error.to_string().contains("checkpoint-5"), "{error}");
        }
        fs::write(&path, &good[..good.len() - 1]).expect("written");
        assert!(file == "MANIFEST.json" || load(&saved, &identity()).is_err(), "{file}");
        fs::remove_file(&path).expect("removed");
        assert!(load(&saved, &identity()).is_err(), "{file}");
    }
    // Without its manifest nobody can say whose it is.
    assert_eq!(save(folder.path(), &snapshot(5), None).expect_err("in the way").exit_code(), 2);
    // A checkpoint under another step's name.
    fs::remove_dir_all(folder_of(folder.path(), 5)).expect("removed");
    let saved = save(folder.path(), &snapshot(5), None).expect("saved");
    fs::rename(&saved, folder_of(folder.path(), 6)).expect("renamed");
    let error = load(&folder_of(folder.path(), 6), &identity()).expect_err("not step 6");
    assert!(error.to_string().ends_with("cannot be resumed: it holds step 5"), "{error}");
    assert_eq!(latest(folder.path()).expect_err("points at nothing").exit_code(), 8);
    for bad in ["", "{", "[]", r#"{"schema":"isobit.pointer/1","checkpoint":"../x","step":5}"#] {
        fs::write(folder.path().join("latest.json"), bad).expect("written");
        assert_eq!(latest(folder.path()).expect_err(bad).exit_code(), 8, "{bad}");
    }
}

#[test]
fn another_run_is_refused_and_the_difference_named() {
    let folder = tempfile::tempdir().expect("folder");
    let saved = save(folder.path(), &snapshot(5), None).expect("saved");
    let refused = |change: fn(&mut Identity)| {
        let mut other = identity();
        change(&mut other);
        let error = load(&saved, &other).expect_err("another run");
        assert_eq!(error.exit_code(), 2);
        error.to_string().split(" belongs to a different run: ").nth(1).expect("says so").to_string()
    };
    let digits = |letter: &str| letter.repeat(16);
    assert_eq!(
        refused(|other| other.numerics = "isobit-2".into()),
        "its numerics version is isobit-1, this run's is isobit-2"
    );
    assert_eq!(
        refused(|other| other.run = "d".repeat(64)),
        format!("its config is {}, this run's is {}", digits("a"), digits("d"))
    );
    assert_eq!(
        refused(|other| {
            other.base = "e".repeat(64);
            other.profile = "x3".into();
        }),
        format!(
            "its profile is x2, this run's is x3; its base model is {}, this run's is {}",
            digits("c"),
            digits("e")
        )
    );
}

#[test]
fn snapshots_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let refused = |change: fn(&mut Snapshot)| {
        let mut bad = snapshot(5);
        change(&mut bad);
        assert!(save(folder.path(), &bad, None).is_err());
        assert_eq!(names(folder.path()), [""; 0]);
    };
    refused(|bad| bad.step = 6);
    refused(|bad| bad.weights[0].shape = vec![7]);
    refused(|bad| bad.weights[0].name = bad.weights[1].name.clone());
    let loads = |change: fn(&mut Snapshot)| {
        let folder = tempfile::tempdir().expect("folder");
        let mut bad = snapshot(5);
        change(&mut bad);
        let saved = save(folder.path(), &bad, None).expect("saved");
        assert_eq!(load(&saved, &identity()).expect_err("makes no sense").exit_code(), 8);
    };
    loads(|bad| bad.moments1.clear());
    loads(|bad| bad.moments1[0].shape = vec![6]);
    loads(|bad| bad.weights.truncate(1));
}

#[test]
fn pruning_never_takes_the_best_or_the_latest() {
    let folder = tempfile::tempdir().expect("folder");
    for step in [1, 2, 10, 9, 30] {
        save(folder.path(), &snapshot(step), None).expect("saved");
    }
    mark_best(folder.path(), 2, 0.5).expect("marked");
    prune(folder.path(), 0, &identity()).expect("pruned");
    assert_eq!(names(folder.path()).len(), 7);
    prune(folder.path(), 2, &identity()).expect("pruned");
    assert_eq!(names(folder.path()), ["best.json", "checkpoint-10", "checkpoint-2", "checkpoint-30", "latest.json"]);
    // Those that are ahead of a run that has gone back stay until it has come there again.
    save(folder.path(), &snapshot(1), None).expect("saved");
    prune(folder.path(), 1, &identity()).expect("pruned");
    assert_eq!(
        names(folder.path()),
        ["best.json", "checkpoint-1", "checkpoint-10", "checkpoint-2", "checkpoint-30", "latest.json"]
    );
    let pointer = best(folder.path()).expect("readable").expect("there");
    assert_eq!((pointer.step, pointer.metric), (2, Some(0.5)));
}

#[test]
fn the_best_of_a_resumed_run_is_what_it_was() {
    let folder = tempfile::tempdir().expect("folder");
    save(folder.path(), &snapshot(1), None).expect("saved");
    save(folder.path(), &snapshot(2), None).expect("saved");
    let mut progress = snapshot(2).progress;
    mark_best(folder.path(), 2, 0.25).expect("marked");
    assert!(restore_best(folder.path(), &progress).expect("restored"));
    assert_eq!(best(folder.path()).expect("readable"), None);
    progress.step = 1;
    assert!(progress.take_eval(0.1));
    assert!(restore_best(folder.path(), &progress).expect("restored"));
    assert_eq!(
        best(folder.path()).expect("readable").map(|pointer| (pointer.step, pointer.metric)),
        Some((1, Some(0.1)))
    );
    progress.step = 9;
    assert!(progress.take_eval(0.05));
    assert!(!restore_best(folder.path(), &progress).expect("nothing there to point at"));
}

fn put_final(output_dir: &Path, run: &Identity, text: &str) -> Result<std::path::PathBuf, Error> {
    let config = serde_json::json!({"peft_type": "LORA"});
    replace_final(output_dir, run, |folder| {
        put_adapter(folder, &config, |path| {
            fs::write(path, text).expect("written");
            Ok(())
        })
    })
}

#[test]
fn the_final_folder_is_replaced_whole() {
    let folder = tempfile::tempdir().expect("folder");
    put_final(folder.path(), &identity(), "one").expect("saved");
    let saved = put_final(folder.path(), &identity(), "two").expect("saved");
    assert_eq!(names(&saved), ["MANIFEST.json", "adapter_config.json", "adapter_model.safetensors"]);
    assert_eq!(fs::read_to_string(saved.join("adapter_model.safetensors")).expect("read"), "two");
    assert_eq!(names(folder.path()), ["final"]);
    // One of another run, one with the user's notes, one of another tool, a link, a file.
    let another = Identity { run: "d".repeat(64), ..identity() };
    assert_eq!(put_final(folder.path(), &another, "three").expect_err("not its own").exit_code(), 2);
    fs::write(saved.join("notes.txt"), "mine").expect("written");
    assert_eq!(put_final(folder.path(), &identity(), "three").expect_err("holds more").exit_code(), 2);
    assert_eq!(fs::read_to_string(saved.join("adapter_model.safetensors")).expect("read"), "two");
    assert_eq!(names(folder.path()), ["final"]);
    fs::remove_file(saved.join("notes.txt")).expect("removed");
    fs::remove_file(saved.join("MANIFEST.json")).expect("removed");
    assert_eq!(put_final(folder.path(), &identity(), "three").expect_err("another tool's").exit_code(), 2);
    fs::remove_dir_all(&saved).expect("removed");
    fs::write(&saved, "a file").expect("written");
    assert_eq!(put_final(folder.path(), &identity(), "three").expect_err("a file").exit_code(), 2);
    assert_eq!(fs::read_to_string(&saved).expect("read"), "a file");
}

/// Everything under a folder: names, and what the files hold.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for name in names(folder) {
        let path = folder.join(&name);
        let inner = if path.is_dir() { contents(&path) } else { vec![(String::new(), fs::read(&path).expect("read"))] };
        all.push((name.clone(), Vec::new()));
        all.extend(inner.into_iter().map(|(inside, bytes)| (format!("{name}/{inside}"), bytes)));
    }
    all
}

#[test]
fn pruning_leaves_alone_what_this_run_has_not_made() {
    let folder = tempfile::tempdir().expect("folder");
    let output = folder.path();
    let mut other = snapshot(1);
    other.progress.identity.run = "d".repeat(64);
    save(output, &other, None).expect("saved");
    fs::create_dir(output.join("checkpoint-2")).expect("empty");
    fs::create_dir(output.join("checkpoint-3")).expect("another tool's");
    fs::write(output.join("checkpoint-3/trainer_state.json"), "{}").expect("written");
    fs::write(output.join("checkpoint-4"), "a file").expect("written");
    for step in [5, 6, 7, 8] {
        save(output, &snapshot(step), None).expect("saved");
    }
    fs::write(output.join("checkpoint-6/notes.txt"), "mine").expect("written");
    let before = contents(output);
    prune(output, 1, &identity()).expect("pruned");
    let gone = |name: &str| name.starts_with("checkpoint-5") || name.starts_with("checkpoint-7");
    let expected: Vec<_> = before.into_iter().filter(|(name, _)| !gone(name)).collect();
    assert_eq!(contents(output), expected);
}

/// Puts something under a name.
type Put = fn(&Path);

/// What a fresh run and a resumed one find in a folder before they write anything.
#[test]
fn what_is_not_of_this_run_is_refused_and_left_as_it_was() {
    let put: [(&str, Put); 12] = [
        ("checkpoint-5", |at| fs::write(at, "a file").expect("written")),
        ("checkpoint-5", |at| fs::create_dir(at).expect("an empty folder")),
        ("checkpoint-5", |at| {
            fs::create_dir(at).expect("folder");
            fs::write(at.join("trainer_state.json"), "{}").expect("written");
        }),
        ("final", |at| {
            fs::create_dir(at).expect("folder");
            fs::write(at.join("adapter_model.safetensors"), "other").expect("written");
        }),
        ("final", |at| fs::write(at, "a file").expect("written")),
        ("metrics.jsonl", |at| fs::write(at, "{\"epoch\":1}\n").expect("written")),
        ("metrics.jsonl", |at| fs::create_dir(at).expect("folder")),
        ("config.resolved.toml", |at| fs::write(at, "[mine]\n").expect("written")),
        ("best.json", |at| fs::write(at, "{\"f1\":0.9}").expect("written")),
        ("stopped.json", |at| fs::write(at, "{}").expect("written")),
        ("LOCK", |at| fs::write(at, "of another program").expect("written")),
        ("LOCK", |at| fs::create_dir(at).expect("folder")),
    ];
    for (name, put) in put {
        let folder = tempfile::tempdir().expect("folder");
        put(&folder.path().join(name));
        let before = contents(folder.path());
        for start in [Start::New, Start::Resume] {
            let error = examine(folder.path(), &identity(), start).expect_err(name);
            assert!(matches!(&error, Error::Foreign { path, .. } if path.ends_with(name)), "{name}: {error}");
            assert_eq!(error.exit_code(), 2);
        }
        assert_eq!(contents(folder.path()), before);
    }
    let folder = tempfile::tempdir().expect("folder");
    fs::write(folder.path().join("latest.json"), "{}").expect("written");
    assert_eq!(examine(folder.path(), &identity(), Start::New).expect_err("strange").exit_code(), 2);
    for other in ["notes", "checkpoint-x", "checkpoint-", "Final", "tensorboard"] {
        let folder = tempfile::tempdir().expect("folder");
        fs::create_dir(folder.path().join(other)).expect("folder");
        assert_eq!(examine(folder.path(), &identity(), Start::New).expect("no name of ours"), None);
    }
    assert_eq!(examine(&folder.path().join("none"), &identity(), Start::Resume).expect("not there"), None);
}

/// Lines and process ids are not synced before the first checkpoint.
#[test]
fn what_a_power_cut_leaves_before_the_first_checkpoint_is_begun_anew() {
    let torn: [&[u8]; 4] = [b"{\"sch", &[0; 700], b"{\"schema\":\"iso\0\0\0\0", b""];
    for metrics in torn {
        let folder = tempfile::tempdir().expect("folder");
        fs::write(folder.path().join("metrics.jsonl"), metrics).expect("written");
        fs::write(folder.path().join("LOCK"), [0; 6]).expect("written");
        let examined = || examine(folder.path(), &identity(), Start::Resume);
        let is_empty = metrics.is_empty();
        assert_eq!(examined().is_ok(), is_empty, "without `latest.json` it is not known to be ours");
        begin(folder.path()).expect("begun");
        assert_eq!(examined().expect("ours"), None);
        fs::write(folder.path().join("metrics.jsonl"), "{\"loss\": 2}").expect("written");
        assert!(matches!(examined(), Err(Error::Foreign { .. })));
    }
}

#[cfg(unix)]
#[test]
fn links_are_neither_followed_nor_replaced() {
    let elsewhere = tempfile::tempdir().expect("folder");
    let saved = save(elsewhere.path(), &snapshot(5), None).expect("saved");
    for name in ["checkpoint-5", "final", "metrics.jsonl", "LOCK"] {
        let folder = tempfile::tempdir().expect("folder");
        std::os::unix::fs::symlink(&saved, folder.path().join(name)).expect("linked");
        for start in [Start::New, Start::Resume] {
            assert_eq!(examine(folder.path(), &identity(), start).expect_err(name).exit_code(), 2, "{name}");
        }
    }
    let folder = tempfile::tempdir().expect("folder");
    save(folder.path(), &snapshot(1), None).expect("saved");
    std::os::unix::fs::symlink(&saved, folder.path().join("checkpoint-5")).expect("linked");
    let mut other = snapshot(5);
    other.weights[0].values[0] = 7.0;
    assert!(save(folder.path(), &other, None).is_err(), "not through the link");
    save(folder.path(), &snapshot(6), None).expect("saved");
    prune(folder.path(), 1, &identity()).expect("pruned");
    assert_eq!(names(folder.path()), ["checkpoint-5", "checkpoint-6", "latest.json"]);
    check_same(&load(&saved, &identity()).expect("whole"), &snapshot(5));
}

#[test]
fn where_a_run_goes_on() {
    let folder = tempfile::tempdir().expect("folder");
    let output = folder.path();
    let at = |start| examine(output, &identity(), start);
    begin(output).expect("begun");
    assert_eq!((at(Start::New).expect("no run"), at(Start::Resume).expect("no run")), (None, None));
    for step in [3, 6, 9] {
        save(output, &snapshot(step), None).expect("saved");
    }
    assert!(matches!(at(Start::New), Err(Error::Holds { .. })));
    assert_eq!(at(Start::Resume).expect("a run"), Some(9));
    assert_eq!(at(Start::From(6)).expect("a checkpoint"), Some(6));
    assert!(matches!(at(Start::From(7)), Err(Error::NoSuch { .. })));
    go_back_to(output, 6).expect("written");
    assert_eq!((at(Start::Resume).expect("a run"), names(output).len()), (Some(6), 4));
    // What lies ahead is not pruned.
    prune(output, 1, &identity()).expect("pruned");
    assert_eq!(names(output), ["checkpoint-6", "checkpoint-9", "latest.json"]);
    fs::remove_file(output.join("latest.json")).expect("removed");
    let error = at(Start::Resume).expect_err("no pointer");
    assert_eq!((error.exit_code(), error.to_string().contains("checkpoint-9")), (8, true), "{error}");
    assert_eq!(at(Start::New).expect_err("a run").exit_code(), 2);
    assert_eq!(at(Start::From(9)).expect("a checkpoint"), Some(9));
    // Killed between naming the first checkpoint and pointing at it.
    fs::remove_dir_all(output.join("checkpoint-9")).expect("removed");
    assert_eq!(at(Start::Resume).expect_err("no pointer").exit_code(), 8);
    begin(output).expect("begun");
    assert_eq!(at(Start::Resume).expect("from the beginning"), None);
    // In the way of the steps to come.
    save(output, &snapshot(3), None).expect("saved");
    fs::write(output.join("checkpoint-6/notes.txt"), "mine").expect("written");
    assert!(matches!(at(Start::Resume), Err(Error::Foreign { .. })));
    go_back_to(output, 6).expect("written");
    assert_eq!(at(Start::Resume).expect("behind it"), Some(6));
}

/// Manifests and states as they were before runs had a digest there.
#[test]
fn checkpoints_of_an_earlier_version_are_known() {
    let folder = tempfile::tempdir().expect("folder");
    let output = folder.path();
    for step in [1, 2, 3] {
        let saved = save(output, &snapshot(step), None).expect("saved");
        let path = saved.join("MANIFEST.json");
        let text = fs::read_to_string(&path).expect("read");
        let mut manifest: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        manifest["schema"] = "isobit.manifest/1".into();
        let fields = manifest.as_object_mut().expect("an object");
        fields.retain(|key, _| ["schema", "files"].contains(&key.as_str()));
        fs::write(&path, manifest.to_string()).expect("written");
    }
    assert_eq!(examine(output, &identity(), Start::Resume).expect("a run"), Some(3));
    check_same(&load(&folder_of(output, 3), &identity()).expect("whole"), &snapshot(3));
    let another = Identity { run: "d".repeat(64), ..identity() };
    prune(output, 1, &another).expect("pruned");
    assert_eq!(names(output).len(), 4);
    prune(output, 1, &identity()).expect("pruned");
    assert_eq!(names(output), ["checkpoint-3", "latest.json"]);
}

#[test]
fn leftovers_go_and_everything_else_stays() {
    let folder = tempfile::tempdir().expect("folder");
    for name in [".final.partial", ".git", "checkpoint-x", "notes"] {
        fs::create_dir_all(folder.path().join(name).join("inner")).expect("folder");
    }
    fs::create_dir(folder.path().join(".checkpoint-3.partial")).expect("folder");
    fs::write(folder.path().join(".checkpoint-3.partial/state.json"), "half").expect("written");
    fs::write(folder.path().join(".checkpoint-3.partial/.isobit-7-1.partial"), "half").expect("written");
    fs::write(folder.path().join(".isobit-7-0.partial"), "half").expect("written");
    fs::write(folder.path().join("metrics.jsonl"), "").expect("written");
    // What is not known to be ours stays, and with it all the rest.
    let before = names(folder.path());
    for is_of_final in [|_: &str| false, |name: &str| name != "inner"] {
        let error = clean(folder.path(), &identity(), is_of_final).expect_err("foreign");
        assert!(matches!(&error, Error::Foreign { path, .. } if path.ends_with(".final.partial")), "{error}");
        assert_eq!((error.exit_code(), names(folder.path())), (2, before.clone()));
    }
    clean(folder.path(), &identity(), |name| name == "inner").expect("cleaned");
    assert_eq!(names(folder.path()), [".git", "checkpoint-x", "metrics.jsonl", "notes"]);
}
