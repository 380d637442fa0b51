"""The dense cases: Qwen2, Qwen3 and Llama, full and with LoRA."""
import copy

import judge
import peft
import torch
import transformers
from writing import (adapt, assert_decay_rule, assert_loads, fresh, measure, old_config, randomize_constants, row, save_adapter,
                     save_model, write_case, write_tensors)

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": False,
         "bos_token_id": 1, "eos_token_id": 2}


def rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def qwen2(**more):
    return transformers.Qwen2Config(**SMALL | rope(1e6) | more)


def qwen3(**more):
    return transformers.Qwen3Config(**SMALL | rope(1e6) | {"head_dim": 16} | more)


def llama(**more):
    return transformers.LlamaConfig(**SMALL | rope(1e4) | {"rms_norm_eps": 1e-5} | more)


# Folder: the config of its model, and whether five updates are stored beside the gradients.
MODELS = {
    "qwen2-base": (lambda: qwen2(), True),
    "qwen2-tied": (lambda: qwen2(tie_word_embeddings=True, intermediate_size=47), True),
    "qwen2-window": (lambda: qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3), False),
    # Channels 0 to 3 of RoPE: as they were, half and half, divided by the factor, divided by the factor.
    "qwen2-yarn": (lambda: qwen2(**rope(1e2, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)), False),
    "qwen2-bf16": (lambda: qwen2(), False),
    "qwen3-base": (lambda: qwen3(), True),
    "qwen3-bias": (lambda: qwen3(attention_bias=True, hidden_size=31), False),
    # Wavelengths 6.3, 13.7, 29.7, 64.6, ...: below 8 they stay, above 32 they are divided by the factor, between is between.
    "llama3-rope": (lambda: llama(head_dim=16, **rope(5e2, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                      original_max_position_embeddings=32)), False),
    "llama-bias": (lambda: llama(attention_bias=True, mlp_bias=True, intermediate_size=47), True),
}
BFLOAT16 = {"qwen2-bf16"}
SHARDED = {"qwen2-base"}
# Also with the config as files of transformers 4 spell it.
OLD_CONFIG = {"qwen2-yarn": "type", "llama3-rope": "rope_type"}

# Folder: the model it adapts, and the settings of LoRA that differ from r 4, alpha 8 on all seven projections.
ONE_MODULE = "layers.1.mlp.down_proj"
ADAPTERS = {
    "qwen2-base-lora": ("qwen2-base", {}),
    "qwen2-base-rslora": ("qwen2-base", {"use_rslora": True}),
    "qwen2-base-pattern": ("qwen2-base", {"rank_pattern": {ONE_MODULE: 3}, "alpha_pattern": {ONE_MODULE: 5}}),
    "qwen2-base-layers": ("qwen2-base", {"layers_to_transform": [1]}),
    "qwen3-base-lora": ("qwen3-base", {}),
    "qwen2-base-saved": ("qwen2-base", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "qwen2-tied-saved": ("qwen2-tied", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}),
}
MERGED = {"qwen2-base-lora"}

# Folder: the model it runs, and its rows.
ROWS = {
    "qwen2-packed": ("qwen2-base", lambda: [row(tokens(15, 13), [1, 7, 8], [5, 1, 9])]),
    "qwen2-unpacked": ("qwen2-base", lambda: [row(tokens(15, 13)[:5], [1]), row(tokens(15, 13)[5:6], []), row(tokens(15, 13)[6:], [1, 2])]),
    "qwen2-window-packed": ("qwen2-window", lambda: [row(tokens(21, 14), [1, 2], [9, 12]), row(tokens(7, 15), [])]),
}


def tokens(length, seed):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def two_rows():
    """Different lengths, a prompt in each, a masked span in the first: 10 and 7 targets."""
    return [row(tokens(17, 11), [0, 1, 2, 3, 9, 10, 11]), row(tokens(11, 12), [0, 1, 2, 3])]


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize_constants(model, 1)
    # The maths is float32 in every case. A model kept in fewer bits loses them here (but not its RoPE frequencies).
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def base_model(name):
    return build(MODELS[name][0](), torch.bfloat16 if name in BFLOAT16 else torch.float32)


def make_model(name):
    model, folder = base_model(name), fresh(name)
    assert_decay_rule(model)
    save_model(copy.deepcopy(model).to(torch.bfloat16) if name in BFLOAT16 else model, folder)
    assert_loads(folder, model)
    if name in OLD_CONFIG:
        old_config(folder, OLD_CONFIG[name])
    if name in SHARDED:
        save_model(model, folder / "sharded", max_shard_size=60_000)
        assert len(list((folder / "sharded").glob("*.safetensors"))) == 2
        assert_loads(folder / "sharded", model)
    train = MODELS[name][1]
    write_case(folder, measure(model, two_rows(), train), two_rows(), "full", name, train)


def make_rows(name):
    base, rows = ROWS[name]
    write_case(fresh(name), measure(base_model(base), rows(), False), rows(), "full", base, False)


def make_adapter(name):
    base, settings = ADAPTERS[name]
    model, folder = adapt(base_model(base), base, {"target_modules": SEVEN} | settings), fresh(name)
    save_adapter(model, folder / "adapter")
    logits = judge.forward(model, two_rows()[0]).logits
    loaded = peft.PeftModel.from_pretrained(base_model(base), folder / "adapter").eval()
    assert torch.equal(judge.forward(loaded, two_rows()[0]).logits, logits)
    if name in MERGED:
        plain, merged = dict(base_model(base).named_parameters()), loaded.merge_and_unload()
        changed = {key: value for key, value in merged.named_parameters() if not torch.equal(value, plain[key])}
        write_tensors(folder / "merged.safetensors", changed)
    write_case(folder, measure(model, two_rows(), True), two_rows(), "lora", base, True)


TABLES = ((MODELS, make_model), (ROWS, make_rows), (ADAPTERS, make_adapter))
