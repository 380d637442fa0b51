//! Training on an emulated AMD card: the machine code of gfx906 gives the CPU's adapter.

use crate::ranks_ground::Silent;
use crate::short_runs::cpu;
use isobit_conformance::skip;
use isobit_gcn::{Architecture, Card, Settings, compiler};
use isobit_kernels::{Backend, Path as CpuPath};
use isobit_training::checkpoint::Start;
use isobit_training::config;
use isobit_training::prepare::prepare;
use isobit_training::ranks::Team;
use isobit_training::run::{Outcome, train};
use std::path::Path;
use tempfile::TempDir;

const UPDATES: u64 = 3;

/// The bytes of the adapter that a run of the demo's config on its model and rows writes, with its
/// first updates only.
fn adapter<B: Backend>(backend: B, output: &Path) -> Vec<u8> {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../isobit/demo");
    let set = |key: &str, path: &Path| format!("{key}=\"{}\"", path.display());
    let overrides = [
        set("base_model", &demo),
        set("datasets.0.path", &demo.join("pirate.jsonl")),
        set("output_dir", output),
        format!("training.max_steps={UPDATES}"),
    ];
    let settled = config::read(&demo.join("demo.toml"), &overrides).expect("a config");
    let prepared = prepare(settled.run).expect("a run");
    let outcome = train(backend, &prepared, Start::New, &Team::alone(), &mut Silent).expect("it trains");
    assert_eq!(outcome, Outcome::Finished { step: UPDATES, early: false });
    std::fs::read(output.join("final/adapter_model.safetensors")).expect("an adapter")
}

#[test]
fn three_updates_of_the_demo_on_gfx906() {
    if compiler().is_none() {
        let why = ("clang".to_string(), "no clang that compiles for amdgcn".to_string());
        return skip("emulated::three_updates_of_the_demo_on_gfx906", &[why]);
    }
    let folder = TempDir::new().expect("a folder");
    let want = adapter(cpu(2, CpuPath::best()), &folder.path().join("cpu"));
    let card = Card::open(Settings { seed: 1, ..Settings::new(Architecture::Gfx906) });
    let card = card.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(adapter(card, &folder.path().join("card")) == want, "another adapter");
}
