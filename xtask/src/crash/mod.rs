//! `cargo xtask crash`: power cuts at every moment of a small run, on a simulated disk, and real
//! kills of the program.
//!
//! A run is recorded change by change (`trace.rs`); `disk.rs` says what a power cut may leave of
//! it; `scene.rs` resumes from that and demands the undisturbed result; `mistakes.rs` plants
//! mistakes that must be found. `--kills N` kills the release binary instead.

mod disk;
mod explore;
mod mistakes;
mod scene;
mod trace;

use crate::arguments::Arguments;
use crate::repository::now;
use crate::torture;
use explore::{Effort, Tried, cuts, failures, recorded, walks};
use mistakes::MISTAKES;
use scene::{SHAPES, Scene};
use std::path::PathBuf;

/// States per moment, besides the fixed ones.
const RANDOM: u64 = 12;
const WALKS: usize = 500;
/// Findings that are reported.
const ENOUGH: usize = 20;

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    if let Some(count) = arguments.parsed("--kills")? {
        return torture::kill(arguments, count);
    }
    let seed = arguments.parsed("--seed")?.unwrap_or(1);
    let random = arguments.parsed("--states")?.unwrap_or(RANDOM);
    let walk_count = arguments.number("--walks", WALKS)?;
    arguments.finish()?;
    let effort = Effort { seed, random, every: 1, enough: ENOUGH };
    let mut findings = 0;
    println!("| run | what | moments | states | findings | s |\n|---|---|---|---|---|---|");
    for shape in &SHAPES {
        let place = Place::new(shape.name)?;
        let scene = Scene::new(&place.0, shape)?;
        let ops = recorded(&scene)?;
        let mut row = |what: &str, tried: &dyn Fn() -> Result<Tried, String>| {
            let begun = now();
            let Tried { moments, states, findings: found } = tried()?;
            let (name, seconds) = (shape.name, begun.elapsed().as_secs_f64());
            println!("| {name} | {what} | {moments} | {states} | {} | {seconds:.0} |", found.len());
            for what in &found {
                eprintln!("{what}");
            }
            findings += found.len();
            Ok::<(), String>(())
        };
        row("power cut before every change", &|| cuts(&scene, &ops, &effort))?;
        row("power cuts in a row", &|| walks(&scene, walk_count, &effort))?;
        row("every change fails", &|| failures(&scene, &effort))?;
        for (name, planted) in MISTAKES {
            let found = cuts(&scene, &planted(&ops), &Effort { random: 4, enough: 1, ..effort })?;
            let Some(first) = found.findings.first() else { return Err(format!("not found: {name}")) };
            eprintln!("{}: planted mistake found after {} states: {name}: {first}", shape.name, found.states);
        }
        println!("| {} | planted mistakes found | {} of {} | | | |", shape.name, MISTAKES.len(), MISTAKES.len());
    }
    if findings == 0 { Ok(()) } else { Err(format!("{findings} findings")) }
}

/// A folder of its own, in memory where the system has such a place: its states are many.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Result<Self, String> {
        let memory = PathBuf::from("/dev/shm");
        let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let folder = parent.join(format!("isobit-crash-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scene(name: &str) -> (Place, Scene) {
        let place = Place::new(name).expect("a folder");
        let scene = Scene::new(&place.0, &SHAPES[0]).expect("a run");
        (place, scene)
    }

    /// A sample of `cargo xtask crash`.
    #[test]
    fn a_run_survives_power_cuts_and_failing_calls() {
        let (_place, scene) = scene("sample");
        let ops = recorded(&scene).expect("a trace");
        let effort = Effort { seed: 7, random: 2, every: 5, enough: 5 };
        let tried = cuts(&scene, &ops, &effort).expect("tried");
        assert!(tried.findings.is_empty() && tried.states > 100, "{tried:?}");
        let tried = walks(&scene, 12, &effort).expect("tried");
        assert!(tried.findings.is_empty(), "{tried:?}");
        let tried = failures(&scene, &Effort { every: 13, ..effort }).expect("tried");
        assert!(tried.findings.is_empty() && tried.states > 50, "{tried:?}");
    }

    #[test]
    fn planted_mistakes_are_found() {
        let (_place, scene) = scene("mistakes");
        let ops = recorded(&scene).expect("a trace");
        for (name, planted) in MISTAKES {
            let effort = Effort { seed: 1, random: 1, every: 1, enough: 1 };
            let changed = planted(&ops);
            assert!(changed != ops, "{name}");
            assert_eq!(cuts(&scene, &changed, &effort).expect("tried").findings.len(), 1, "{name}");
        }
    }
}
