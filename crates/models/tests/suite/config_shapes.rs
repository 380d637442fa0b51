//! Shapes from a config alone: what a file of that model holds, as far as a config says it.

use isobit_models::{Config, ConfigShapes, Inventory, WeightSource, Weights};
use isobit_proof::safetensors::TensorFiles;
use std::path::Path;

#[test]
fn modules_are_quantised_as_their_file_says() {
    let mut found = 0;
    let names =
        ["awq", "awq-moe", "gptq-v1", "gptq-v1-asymmetric", "gptq-v2-whole", "gptq-moe", "gptoss-mxfp4", "qwen2-base"];
    for name in names {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let text = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let beside = std::fs::read_to_string(folder.join("quantize_config.json")).ok();
        let config = Config::parse_with(&text, beside.as_deref()).expect("a readable config");
        let file = Weights::new(TensorFiles::open(&folder).expect("weights"), &config).expect("known names");
        let alone = ConfigShapes::new(&config).expect("a readable config");
        for path in Inventory::of(&config).adaptable() {
            let module = format!("{path}.qweight");
            // AWQ packs along outputs.
            let per_word = if name.starts_with("awq") { [8, 1] } else { [1, 8] };
            let packed = file.shape(&module).unwrap_or_else(|| vec![config.hidden, 1]);
            let (outputs, inputs) = (packed[1] * per_word[0], packed[0] * per_word[1]);
            let [in_file, from_config] =
                [file.quantised(path, outputs, inputs), alone.quantised(path, outputs, inputs)];
            let (in_file, from_config) = (in_file.expect("a form"), from_config.expect("a form"));
            found += usize::from(in_file.is_some());
            assert_eq!(in_file, from_config, "{name}: {path}");
        }
        for start in Inventory::of(&config).experts() {
            let quantised = |names: Option<Vec<String>>| -> Vec<String> {
                let mut names: Vec<String> = names.unwrap_or_default();
                let ends = [".qweight", "_blocks", "_scales"];
                names.retain(|name| ends.iter().any(|end| name.ends_with(end)));
                names.sort();
                names
            };
            let names = quantised(file.names_under(start));
            assert_eq!(quantised(alone.names_under(start)), names, "{name}: {start}");
            for part in names.iter().filter(|name| !name.ends_with(".qweight")) {
                assert_eq!(alone.shape(part), file.shape(part), "{name}: {part}");
            }
        }
    }
    assert!(found > 10, "{found} quantised modules");
}
