//! Shapes from a config alone: what a file of that model holds, as far as a config says it.

use isobit_models::{Config, ConfigShapes, Inventory, WeightSource, Weights};
use isobit_proof::safetensors::TensorFiles;
use std::path::Path;

#[test]
fn modules_are_quantised_as_their_file_says() {
    let mut found = 0;
    for name in ["gptq-v1", "gptq-v1-asymmetric", "gptq-v2-whole", "gptq-moe", "qwen2-base"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let text = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let beside = std::fs::read_to_string(folder.join("quantize_config.json")).ok();
        let config = Config::parse_with(&text, beside.as_deref()).expect("a readable config");
        let file = Weights::new(TensorFiles::open(&folder).expect("weights"), &config).expect("known names");
        let alone = ConfigShapes::new(&config).expect("a readable config");
        for path in Inventory::of(&config).adaptable() {
            let module = format!("{path}.qweight");
            let inputs = file.shape(&module).map_or(config.hidden, |shape| 8 * shape[0]);
            let outputs = file.shape(&module).map_or(1, |shape| shape[1]);
            let [in_file, from_config] =
                [file.quantised(path, outputs, inputs), alone.quantised(path, outputs, inputs)];
            let (in_file, from_config) = (in_file.expect("a form"), from_config.expect("a form"));
            found += usize::from(in_file.is_some());
            assert_eq!(in_file, from_config, "{name}: {path}");
        }
        for start in Inventory::of(&config).experts() {
            let quantised = |names: Option<Vec<String>>| -> Vec<String> {
                let mut names: Vec<String> = names.unwrap_or_default();
                names.retain(|name| name.ends_with(".qweight"));
                names.sort();
                names
            };
            assert_eq!(quantised(alone.names_under(start)), quantised(file.names_under(start)), "{name}: {start}");
        }
    }
    assert!(found > 10, "{found} quantised modules");
}
