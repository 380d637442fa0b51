//! Training on an emulated AMD card: the machine code of gfx906 gives the CPU's bits.

use crate::short_runs::{Run, cpu};
use isobit_conformance::skip;
use isobit_gcn::{Architecture, Card, Settings, compiler};
use isobit_kernels::Path as CpuPath;
use isobit_models::{LoraConfig, Trained};

/// The folder of the demo's model, seen from the fixtures.
const DEMO: &str = "../../../isobit/demo";

#[test]
fn three_updates_of_the_demo_model_on_gfx906() {
    if compiler().is_none() {
        let why = ("clang".to_string(), "no clang that compiles for amdgcn".to_string());
        return skip("emulated::three_updates_of_the_demo_model_on_gfx906", &[why]);
    }
    let lora = LoraConfig::new(4, 8.0, &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]);
    let run = Run::new(DEMO, Trained::Lora(lora));
    let want = run.on(cpu(2, CpuPath::best()));
    let card = Card::open(Settings { seed: 1, ..Settings::new(Architecture::Gfx906) });
    let card = card.unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(run.on(card), want);
}
