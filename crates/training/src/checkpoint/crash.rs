//! The crash test: saving, marking and pruning, stopped before every single change to the disk.
//! What is left must be a run folder that resumes from a whole checkpoint, the old or the new one.

use super::folder::{mark_best_watched, prune_watched};
use super::stopped::announce_watched;
use super::write::save_watched;
use super::*;
use isobit_proof::safetensors::NamedTensor;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(super) fn identity() -> Identity {
    let digest = |letter: &str| letter.repeat(64);
    Identity {
        run: digest("a"),
        data: digest("b"),
        base: digest("c"),
        profile: "x2".to_string(),
        numerics: isobit_numerics::VERSION.to_string(),
        start: None,
        load_in_4bit: None,
    }
}

pub(super) fn snapshot(step: u64) -> Snapshot {
    let tensor = |name: &str, seed: u32| NamedTensor {
        name: format!("base_model.model.{name}.weight"),
        shape: vec![2, 3],
        values: (0..6).map(|i| f32::from_bits(0x3f80_0000 ^ (seed + i + step as u32 * 977))).collect(),
    };
    let of = |seed| vec![tensor("q_proj.lora_A", seed), tensor("q_proj.lora_B", seed + 100)];
    let mut progress = Progress::start(identity());
    progress.step = step;
    Snapshot { step, weights: of(1), moments1: of(2), moments2: of(3), progress }
}

pub(super) fn config() -> serde_json::Value {
    serde_json::json!({ "peft_type": "LORA", "r": 8 })
}

type Work = fn(&Path, BeforeWrite<'_>) -> Result<(), Error>;

/// Everything the loop does to the disk after step 30, when checkpoints 10 (the best) and 20 exist.
fn work(output_dir: &Path, watch: BeforeWrite<'_>) -> Result<(), Error> {
    save_watched(output_dir, &snapshot(30), Some(&config()), watch)?;
    mark_best_watched(output_dir, 30, 1.5, watch)?;
    prune_watched(output_dir, 1, &identity(), watch)
}

fn before(output_dir: &Path) {
    for step in [10, 20] {
        save(output_dir, &snapshot(step), Some(&config())).expect("saved");
    }
    mark_best(output_dir, 10, 2.0).expect("marked");
}

/// The half-written file that a stopped writer leaves under its temporary name.
fn leave_partial(path: &Path) {
    if let Some(parent) = path.parent().filter(|parent| parent.is_dir()) {
        fs::write(parent.join(".isobit-1-2.partial"), b"half").expect("written");
    }
}

fn stopped_at(work: Work, output_dir: &Path, stop: usize) -> bool {
    let mut count = 0;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        work(output_dir, &mut |path| {
            if count == stop {
                leave_partial(path);
                // Unlike a panic, this prints nothing.
                resume_unwind(Box::new("the power goes"));
            }
            count += 1;
            Ok(())
        })
    }));
    match outcome {
        Ok(result) => {
            result.expect("nothing failed");
            false
        }
        Err(_) => true,
    }
}

/// The checkpoint to resume from.
fn go_on(output_dir: &Path) -> PathBuf {
    let Ok(Latest::At(step)) = latest(output_dir) else { panic!("there was one before") };
    folder_of(output_dir, step)
}

/// Checks that everything under a final name is whole.
fn check_whole(output_dir: &Path) -> u64 {
    for entry in fs::read_dir(output_dir).expect("folder") {
        let entry = entry.expect("entry");
        let name = entry.file_name().into_string().expect("UTF-8");
        if let Some(step) = step_of(&name) {
            assert_eq!(load(&entry.path(), &identity()).expect("whole"), snapshot(step), "{name}");
        }
    }
    let latest = go_on(output_dir);
    let best = best(output_dir).expect("readable").expect("there was one before");
    assert!(load(&folder_of(output_dir, best.step), &identity()).is_ok());
    load(&latest, &identity()).expect("whole").step
}

#[test]
fn stopped_before_any_change_of_the_disk_the_run_goes_on() {
    let mut reached = Vec::new();
    for stop in 0.. {
        let folder = tempfile::tempdir().expect("folder");
        let output_dir = folder.path();
        before(output_dir);
        if !stopped_at(work, output_dir, stop) {
            break;
        }
        reached.push(check_whole(output_dir));
        clean(output_dir, &identity(), |_| false).expect("cleaned");
        let hidden = fs::read_dir(output_dir)
            .expect("folder")
            .filter(|entry| entry.as_ref().expect("entry").file_name().to_string_lossy().starts_with('.'));
        assert_eq!(hidden.count(), 0, "stop {stop}");
        assert_eq!(check_whole(output_dir), *reached.last().expect("pushed"));
        // Continuing reaches the same folder, whatever was left.
        work(output_dir, &mut unwatched).expect("works");
        assert_eq!(check_whole(output_dir), 30);
        let mut names: Vec<_> =
            fs::read_dir(output_dir).expect("folder").map(|entry| entry.expect("entry").file_name()).collect();
        names.sort();
        assert_eq!(names, ["best.json", "checkpoint-30", "latest.json"], "stop {stop}");
    }
    let first_new = reached.iter().position(|&step| step == 30).expect("the new one appears");
    assert!(reached[..first_new].iter().all(|&step| step == 20) && reached[first_new..].iter().all(|&step| step == 30));
    // Folder, five files, rename, two pointers, and two removals of two changes each.
    assert_eq!(reached.len(), 13);
}

/// The loop after step 25, when a signal has arrived, and after step 30, when the run has been
/// resumed.
fn signal(output_dir: &Path, watch: BeforeWrite<'_>) -> Result<(), Error> {
    announce_watched(output_dir, 25, true, watch)?;
    save_watched(output_dir, &snapshot(25), Some(&config()), watch)?;
    prune_watched(output_dir, 2, &identity(), watch)
}

fn resumed(output_dir: &Path, watch: BeforeWrite<'_>) -> Result<(), Error> {
    announce_watched(output_dir, 30, false, watch)?;
    save_watched(output_dir, &snapshot(30), Some(&config()), watch)?;
    prune_watched(output_dir, 2, &identity(), watch)
}

/// Stopped by a signal after step 22 and again after 25, with each save and each cleanup cut short
/// at every point.
#[test]
fn what_a_signal_saved_goes_however_often_the_run_dies() {
    let whole = tempfile::tempdir().expect("folder");
    before(whole.path());
    resumed(whole.path(), &mut unwatched).expect("works");
    let expected = shown(whole.path());
    assert_eq!(expected, ["best.json", "checkpoint-10", "checkpoint-20", "checkpoint-30", "latest.json"]);
    let mut stops = 0;
    for stop in 0.. {
        let folder = tempfile::tempdir().expect("folder");
        let output_dir = folder.path();
        before(output_dir);
        announce(output_dir, 22, true).expect("announced");
        save(output_dir, &snapshot(22), Some(&config())).expect("saved");
        prune(output_dir, 2, &identity()).expect("pruned");
        assert_eq!(load(&go_on(output_dir), &identity()).expect("whole").step, 22);
        let [first, second] = [signal as Work, resumed].map(|work| {
            let stopped = stopped_at(work, output_dir, stop);
            check_whole(output_dir);
            clean(output_dir, &identity(), |_| false).expect("cleaned");
            check_whole(output_dir);
            stopped
        });
        stops += u32::from(first) + u32::from(second);
        resumed(output_dir, &mut unwatched).expect("works");
        assert_eq!(shown(output_dir), expected, "stop {stop}");
        if !first && !second {
            break;
        }
    }
    assert!(stops > 20, "{stops}");
}

/// Names in a folder, sorted.
fn shown(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("entry").file_name().into_string().expect("UTF-8");
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

#[test]
fn a_save_that_fails_keeps_the_old_and_gives_its_space_back() {
    for stop in 0..7 {
        let folder = tempfile::tempdir().expect("folder");
        let output_dir = folder.path();
        before(output_dir);
        let mut count = 0;
        let result = work(output_dir, &mut |path| {
            count += 1;
            let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
            if count > stop { Err(FileError::from_io("write", path, source)) } else { Ok(()) }
        });
        assert_eq!(result.expect_err("the disk is full").exit_code(), 7);
        assert_eq!(check_whole(output_dir), 20);
        assert!(!output_dir.join(".checkpoint-30.partial").exists(), "stop {stop}");
    }
}
