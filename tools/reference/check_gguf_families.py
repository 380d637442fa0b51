"""Every family that `isobit export gguf` writes, as llama.cpp reads it: a small random model each, judged as check_llama_cpp.py does.

    NODE_MODULES=.../node_modules check_gguf_families.py [FAMILY...]

The models have the demo's tokenizer. Needs what check_llama_cpp.py needs.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import families
import transformers
from dense import rope
from sparse import build

HERE = pathlib.Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "crates/isobit/demo"
ISOBIT = os.environ.get("ISOBIT", HERE / "../../target/release/isobit")
COUNT = 20
SIZES = {"vocab_size": 327, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 512, "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WIDE = SIZES | {"head_dim": 32, "intermediate_size": 96}
DENSE = SIZES | {"intermediate_size": 96}
FEW = DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen2": lambda: transformers.Qwen2Config(**DENSE | rope(1e4)),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE | rope(1e4)),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**WIDE | rope(1e4) | {"num_experts": 4, "num_experts_per_tok": 2,
                                                                           "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "llama": lambda: transformers.LlamaConfig(**DENSE | rope(1e4) | {"attention_bias": True, "mlp_bias": True}),
    "mistral": lambda: families.mistral(**WIDE | {"sliding_window": None}),
    "mixtral": lambda: families.mixtral(**FEW | {"head_dim": 16}),
    "smollm3": lambda: families.smollm3(**DENSE | {"no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    "granite": lambda: families.granite(**DENSE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoe": lambda: families.granite_moe(**FEW),
    "olmo2": lambda: families.olmo2(**DENSE | {"attention_bias": False}),
}


def main(names):
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or FAMILIES:
            folder, file = pathlib.Path(scratch, name), pathlib.Path(scratch, f"{name}.gguf")
            build(FAMILIES[name](), 0).save_pretrained(folder)
            for part in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / part, folder)
            subprocess.run([ISOBIT, "export", "gguf", folder, "--type", "f32", "-o", file], check=True, capture_output=True)
            ran = subprocess.run([sys.executable, HERE / "check_llama_cpp.py", file, folder, "The user asks the assistant", str(COUNT)],
                                 capture_output=True, text=True)
            print(f"{name}: {ran.stdout if ran.returncode == 0 else 'FAILED: ' + ran.stdout + ran.stderr[-800:]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
