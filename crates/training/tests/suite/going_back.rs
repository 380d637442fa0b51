//! A run that goes back to an earlier checkpoint, and is killed before any change that it makes to
//! the disk: what is left is an unfinished run, never damage.

use crate::ranks_ground::{Ground, Silent};
use isobit_kernels::{Cpu, Path as CpuPath};
use isobit_proof::disk::{Change, Watcher, watched};
use isobit_proof::verify::verify;
use isobit_training::checkpoint::Start;
use isobit_training::prepare::{Prepared, RunError};
use isobit_training::ranks::Team;
use isobit_training::run::{Outcome, train};
use std::cell::Cell;
use std::io;
use std::path::Path;
use std::rc::Rc;

const LORA: &str = "type = \"lora\"\nlora_r = 4\nlora_target_modules = [\"q_proj\", \"down_proj\"]";

/// Refuses every change after the first so many.
struct Killed(Cell<usize>);

impl Watcher for Killed {
    fn before(&self, _: &Change<'_>) -> io::Result<()> {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        if left == 0 { Err(io::Error::other("killed")) } else { Ok(()) }
    }
}

fn run(prepared: &Prepared, start: Start) -> Result<Outcome, RunError> {
    let cpu = Cpu::new(1, CpuPath::best()).expect("an available path");
    train(cpu, prepared, start, &Team::alone(), &mut Silent)
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).expect("folder");
    for entry in std::fs::read_dir(from).expect("folder") {
        let (source, name) = entry.map(|entry| (entry.path(), entry.file_name())).expect("entry");
        let target = to.join(name);
        if source.is_dir() { copy(&source, &target) } else { _ = std::fs::copy(&source, &target).expect("copied") }
    }
}

/// With other lines of metrics and fewer checkpoints than before; a sample of the changes.
#[test]
fn a_kill_while_a_run_goes_back_is_no_damage() {
    let ground = Ground::new("qwen2-base", LORA);
    run(&ground.prepared("run", &[], None).expect("prepared"), Start::New).expect("trained");
    let other = ["training.logging_steps=3", "training.save_total_limit=1"];
    let prepared = ground.prepared("run", &other, None).expect("prepared");
    let folder = &prepared.run.output_dir;
    let honest = folder.with_file_name("honest");
    copy(folder, &honest);
    for start in [Start::From(2), Start::Resume] {
        for changes in (0..).step_by(3) {
            copy(&honest, folder);
            let ended = watched(Rc::new(Killed(Cell::new(changes))), || run(&prepared, start));
            let report = verify(folder).expect("read");
            assert_eq!(report.findings, [], "{start:?}, killed before change {changes}");
            if ended.is_ok() {
                assert!(changes > 20, "{changes}");
                break;
            }
            run(&prepared, Start::Resume).expect("resumed");
            assert_eq!(verify(folder).expect("read").findings, [], "{start:?}, resumed after change {changes}");
        }
    }
}
