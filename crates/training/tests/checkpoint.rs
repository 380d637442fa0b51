//! Checkpoints of a run folder: what is saved comes back on bits, and nothing damaged or foreign is taken for it.

use isobit_training::checkpoint::{
    Error, Identity, NamedTensor, Progress, Snapshot, best, clean, folder_of, inspect, latest, load, mark_best, prune,
    restore_best, save, save_final,
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
    assert_eq!(latest(folder.path()).expect("readable"), None);
    let adapter = serde_json::json!({"peft_type": "LORA", "lora_alpha": 16});
    for (step, config) in [(5, None), (7, Some(&adapter))] {
        let saved = save(folder.path(), &snapshot(step), config).expect("saved");
        assert_eq!(latest(folder.path()).expect("readable"), Some(saved.clone()));
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
    assert_eq!(inspect(&latest(&target).expect("readable").expect("there")).expect("whole").step, 7);
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
    // A checkpoint under another step's name.
    let saved = save(folder.path(), &snapshot(5), None).expect("saved");
    fs::rename(&saved, folder_of(folder.path(), 6)).expect("renamed");
    let error = load(&folder_of(folder.path(), 6), &identity()).expect_err("not step 6");
    assert!(error.to_string().ends_with("cannot be continued: it holds step 5"), "{error}");
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
        error.to_string().split(" is of another run: ").nth(1).expect("says so").to_string()
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
    prune(folder.path(), 0).expect("pruned");
    assert_eq!(names(folder.path()).len(), 7);
    prune(folder.path(), 2).expect("pruned");
    assert_eq!(names(folder.path()), ["best.json", "checkpoint-10", "checkpoint-2", "checkpoint-30", "latest.json"]);
    save(folder.path(), &snapshot(1), None).expect("saved");
    prune(folder.path(), 1).expect("pruned");
    assert_eq!(names(folder.path()), ["best.json", "checkpoint-1", "checkpoint-2", "checkpoint-30", "latest.json"]);
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

#[test]
fn the_final_folder_is_replaced_whole() {
    let folder = tempfile::tempdir().expect("folder");
    let config = serde_json::json!({"peft_type": "LORA"});
    save_final(folder.path(), &snapshot(1).weights, Some(&config)).expect("saved");
    let saved = save_final(folder.path(), &snapshot(2).weights, Some(&config)).expect("saved");
    assert_eq!(names(&saved), ["MANIFEST.json", "adapter_config.json", "adapter_model.safetensors"]);
    assert_eq!(names(folder.path()), ["final"]);
}

#[test]
fn leftovers_go_and_everything_else_stays() {
    let folder = tempfile::tempdir().expect("folder");
    for name in [".checkpoint-3.partial", ".final.partial", ".git", "checkpoint-x", "notes"] {
        fs::create_dir_all(folder.path().join(name).join("inner")).expect("folder");
    }
    fs::write(folder.path().join(".isobit-7-0.partial"), "half").expect("written");
    fs::write(folder.path().join("metrics.jsonl"), "").expect("written");
    clean(folder.path()).expect("cleaned");
    assert_eq!(names(folder.path()), [".git", "checkpoint-x", "metrics.jsonl", "notes"]);
}
