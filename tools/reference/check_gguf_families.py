"""Every family that `isobit export gguf` writes, as llama.cpp reads it: a small random model each, judged as check_llama_cpp.py does.

    NODE_MODULES=.../node_modules check_gguf_families.py [--adapters] [FAMILY...]

With `--adapters` also a random adapter on each, as a LoRA file beside the base. The models have the demo's tokenizer. Needs what
check_llama_cpp.py needs.
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
from sparse import ATTENTION, build, deepseek
from writing import adapt

HERE = pathlib.Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "crates/isobit/demo"
ISOBIT = os.environ.get("ISOBIT", HERE / "../../target/release/isobit")
COUNT = 20
PROMPT = "The user asks the assistant"
SIZES = {"vocab_size": 327, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 512, "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WIDE = SIZES | {"head_dim": 32, "intermediate_size": 96}
DENSE = SIZES | {"intermediate_size": 96}
FEW = DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}
# Windows are shorter than the texts.
WINDOW = {"sliding_window": 8}
LATENT = SIZES | WINDOW | {"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 24, "kv_lora_rank": 32,
                           "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "rms_norm_eps": 1e-6}


def gpt_oss():
    """llama.cpp always truncates; published models do not."""
    stretched = rope(1e2, rope_type="yarn", factor=32.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0, truncate=True)
    return families.gpt_oss(**WIDE | WINDOW | stretched | {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0})


def gemma3(**more):
    types = ["sliding_attention"] * 5 + ["full_attention"]
    return families.gemma3(**WIDE | WINDOW | {"num_hidden_layers": 6, "layer_types": types, "query_pre_attn_scalar": 32} | more)


def phi3_long():
    """Six pairs of channels; the texts are shorter than the original length."""
    long = families.long_rope(600)
    long["rope_parameters"] |= {"short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0], "long_factor": [1.2, 2.0, 4.5, 5.0, 6.0, 8.0]}
    return families.phi3(**DENSE | {"sliding_window": None, "max_position_embeddings": 1200} | long)


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
    "olmo3": lambda: families.olmo3(**DENSE | WINDOW | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "gemma2": lambda: families.gemma2(**WIDE | WINDOW | {"query_pre_attn_scalar": 32}),
    "gemma3": gemma3,
    "gemma3-untied": lambda: gemma3(tie_word_embeddings=False),
    "phi3": lambda: families.phi3(**DENSE | {"sliding_window": None}),
    "phi3-long": phi3_long,
    "glm4": lambda: families.glm4(**WIDE | {"attention_bias": True}),
    "glm": lambda: transformers.GlmConfig(**DENSE | {"head_dim": 16} | rope(1e4, partial_rotary_factor=0.5) | {"attention_bias": True}),
    "glm4_moe": lambda: families.glm4_moe(**WIDE | {"moe_intermediate_size": 32}),
    "gpt_oss": gpt_oss,
    "deepseek": lambda: deepseek(**LATENT),
    "deepseek-plain": lambda: deepseek(**LATENT | rope(1e4) | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "kimi": lambda: deepseek(**LATENT | rope(
        1e2, rope_type="yarn", factor=32.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0) | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}),
}
MLP = ["gate_proj", "up_proj", "down_proj"]
JOINED = ["gate_up_proj", "down_proj"]
FUSED = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
# Targets of an adapter; all linear modules elsewhere.
TARGETS = {"phi3": ["qkv_proj", "o_proj", *JOINED], "glm4": [*ATTENTION, *JOINED], "glm": [*ATTENTION, *JOINED],
           # llama.cpp adapts no other projection of latent attention.
           "deepseek": ["o_proj"], "kimi": ["o_proj"]}


def targets(name):
    family = name.split("-")[0]
    experts = FUSED if family in ("gpt_oss", "qwen3_moe", "mixtral", "granitemoe") else {}
    dense = [*ATTENTION, *MLP] if not experts and family != "glm4_moe" else ATTENTION
    return {"target_modules": TARGETS.get(family, dense)} | experts


def judge(name, *arguments):
    ran = subprocess.run([sys.executable, HERE / "check_llama_cpp.py", *arguments], capture_output=True, text=True)
    print(f"{name}: {ran.stdout if ran.returncode == 0 else 'FAILED: ' + ran.stdout + ran.stderr[-800:]}", flush=True)


def export(*arguments):
    # llama.cpp expects certain tokens of models with certain names.
    ran = subprocess.run([ISOBIT, "export", "gguf", *arguments, "--name", "small"], capture_output=True, text=True)
    if ran.returncode:
        print(f"FAILED: {ran.stderr}", flush=True)
    return ran.returncode == 0


def main(names, adapters):
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCRATCH")) as scratch:
        for name in names or FAMILIES:
            folder, file = pathlib.Path(scratch, name), pathlib.Path(scratch, f"{name}.gguf")
            model = build(FAMILIES[name](), 0)
            model.save_pretrained(folder)
            for part in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / part, folder)
            if not export(folder, "--type", "f32", "-o", file):
                continue
            judge(name, file, folder, PROMPT, str(COUNT))
            if adapters:
                adapter, lora = pathlib.Path(scratch, f"{name}-adapter"), pathlib.Path(scratch, f"{name}-lora.gguf")
                adapt(model, str(folder), targets(name)).save_pretrained(adapter)
                if export(adapter, "--base", folder, "-o", lora):
                    judge(f"{name}, adapter", file, folder, PROMPT, str(COUNT), "--adapter", adapter, lora)


if __name__ == "__main__":
    options = sys.argv[1:]
    main([name for name in options if name != "--adapters"], "--adapters" in options)
