//! Loading leaves no gaps between the buffers of a card.

use isobit_kernels::Gpu;
use isobit_kernels::gpu::{Api, Selector};
use isobit_kernels::plan::Counting;
use isobit_models::build::Settings;
use isobit_models::{Config, ConfigShapes, Trained, build};
use isobit_numerics::slices::Profile;

/// Matrices of many sizes: experts whose gates and ups are twice as large as their downs, and
/// attention of both kinds. 35 billion parameters.
const CONFIG: &str = r#"{"model_type":"qwen3_5_moe_text","hidden_size":2048,"moe_intermediate_size":512,
    "shared_expert_intermediate_size":512,"num_hidden_layers":40,"num_attention_heads":16,"num_key_value_heads":2,
    "head_dim":256,"num_experts":256,"num_experts_per_tok":8,"linear_num_key_heads":16,"linear_num_value_heads":32,
    "linear_key_head_dim":128,"linear_value_head_dim":128,"vocab_size":248320,"tie_word_embeddings":false}"#;

#[test]
fn a_model_with_experts_lies_without_gaps() {
    let config = Config::parse(CONFIG).expect("a config");
    let source = ConfigShapes::new(&config).expect("shapes");
    for profile in [Profile::X2, Profile::X3] {
        let backend = Counting::new(Gpu::absent(Selector { api: Api::Cuda, index: 0 }, Some((9, 0))));
        let settings = Settings { trained: Trained::Nothing, profile, positions: 64, seed: 0 };
        let built = build(&backend, &config, &source, &settings).expect("a model");
        let (bytes, heap) = (backend.bytes_peak(), backend.heap_bytes().expect("a card with ranges"));
        assert!(heap <= bytes + bytes / 100, "{profile:?}: {bytes} bytes lie in {heap}");
        drop(built);
    }
}
