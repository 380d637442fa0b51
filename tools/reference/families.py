"""The cases of further families, one or two each: Mistral, Mixtral, SmolLM3, Granite, OLMo, Phi-3, GLM-4, Kimi-K2, Gemma, Qwen3-VL,
gpt-oss.

They join the tables of `sparse.py`, and hold a text that transformers continues (`generation` in case.json).
"""
import json

import layouts
import sparse
import transformers
from dense import rope
from sparse import ATTENTION, EXPERTS, deepseek, one_row, short_rows, two_rows, yarn
from writing import write_config

SMALL = sparse.SMALL | {"intermediate_size": 20, "head_dim": 8, "pad_token_id": None}
NO_HEAD_WIDTH = {key: value for key, value in SMALL.items() if key != "head_dim"}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 6}
SEVEN = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def mistral(**more):
    return transformers.MistralConfig(**SMALL | rope(1e4) | {"sliding_window": 5} | more)


def mixtral(**more):
    return transformers.MixtralConfig(**SMALL | rope(1e4) | FEW_EXPERTS | more)


def smollm3(**more):
    return transformers.SmolLM3Config(**NO_HEAD_WIDTH | rope(1e4) | {"no_rope_layer_interval": 2} | more)


def granite(**more):
    return transformers.GraniteConfig(**NO_HEAD_WIDTH | rope(1e4) | MULTIPLIERS | more)


MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}


def granite_moe(**more):
    return transformers.GraniteMoeConfig(**NO_HEAD_WIDTH | rope(1e4) | MULTIPLIERS | FEW_EXPERTS | more)


def olmo2(**more):
    return transformers.Olmo2Config(**NO_HEAD_WIDTH | rope(1e4) | {"attention_bias": True} | more)


def olmo3(**more):
    """Two windows, then a layer that sees all and whose rotation is stretched."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    stretched = {"rope_type": "yarn", "rope_theta": 1e2, "factor": 4.0, "original_max_position_embeddings": 32}
    return transformers.Olmo3Config(**NO_HEAD_WIDTH | {
        "num_hidden_layers": 3, "sliding_window": 5, "layer_types": types, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2}, "full_attention": stretched}} | more)


def phi3(**more):
    return transformers.Phi3Config(**NO_HEAD_WIDTH | {"hidden_size": 32} | rope(1e4, partial_rotary_factor=0.5)
                                   | {"sliding_window": 6} | more)


def long_rope(original):
    """Three pairs of channels, each with a factor for short texts and one for long ones."""
    return {"original_max_position_embeddings": original, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e2, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.2, 2.0, 4.5], "original_max_position_embeddings": original}}


def glm4(**more):
    return transformers.Glm4Config(**SMALL | rope(1e4, partial_rotary_factor=0.5) | more)


def glm4_moe(**more):
    return transformers.Glm4MoeConfig(**SMALL | rope(1e4, partial_rotary_factor=0.5) | {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
        "attention_bias": True} | more)


def kimi_k2():
    return deepseek(**yarn(mscale=1.0, mscale_all_dim=1.0), n_group=1, topk_group=1, num_hidden_layers=2,
                    routed_scaling_factor=2.827)


def gemma2(**more):
    """Caps so low that they matter."""
    return transformers.Gemma2Config(**SMALL | rope(1e4) | {
        "tie_word_embeddings": True, "query_pre_attn_scalar": 12, "sliding_window": 5, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0} | more)


def gemma3(**more):
    """A window, then a layer that sees all; each kind rotates by a base of its own."""
    return transformers.Gemma3TextConfig(**SMALL | {
        "tie_word_embeddings": True, "query_pre_attn_scalar": 12, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}} | more)


def qwen3_vl_text():
    return transformers.Qwen3Config(**SMALL | rope(1e4))


def qwen3_vl_moe_text():
    return transformers.Qwen3MoeConfig(**SMALL | rope(1e4) | EXPERTS | {"norm_topk_prob": True})


def gpt_oss(**more):
    """A window, then a layer that sees all; a limit so low that it matters."""
    stretched = rope(1e2, rope_type="yarn", factor=32.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0,
                     truncate=False)
    return transformers.GptOssConfig(**SMALL | stretched | FEW_EXPERTS | {"sliding_window": 5, "swiglu_limit": 1.0} | more)


def long_row(seed=11):
    return [sparse.row(sparse.tokens(21, seed), [0, 1])]


MODELS = {
    "mistral-window": (mistral, two_rows, True),
    "mixtral-base": (mixtral, two_rows, True),
    "mixtral-aux": (lambda: mixtral(sliding_window=5, **sparse.AUXILIARY), one_row, False),
    "smollm3-base": (lambda: smollm3(tie_word_embeddings=True), two_rows, True),
    "granite-base": (granite, two_rows, True),
    "granitemoe-base": (granite_moe, two_rows, True),
    "olmo2-base": (olmo2, two_rows, True),
    "olmo3-base": (olmo3, two_rows, True),
    "phi3-base": (phi3, two_rows, True),
    # The rows are longer than the text that the rotation was made for, or not.
    "phi3-long": (lambda: phi3(max_position_embeddings=128, **long_rope(16)), long_row, False),
    "phi3-short": (lambda: phi3(max_position_embeddings=256, **long_rope(128)), short_rows, False),
    "glm4-base": (glm4, two_rows, True),
    "glm-base": (lambda: transformers.GlmConfig(**SMALL | rope(1e4, partial_rotary_factor=0.5)), two_rows, False),
    "glm4moe-base": (glm4_moe, two_rows, True),
    "kimi-base": (kimi_k2, short_rows, False),
    "gemma2-base": (gemma2, two_rows, True),
    "gemma3-base": (gemma3, two_rows, True),
    "gptoss-base": (gpt_oss, two_rows, True),
    "gptoss-aux": (lambda: gpt_oss(**sparse.AUXILIARY), one_row, False),
    "qwen3vl-base": (qwen3_vl_text, two_rows, False),
    "qwen3vlmoe-base": (qwen3_vl_moe_text, two_rows, False),
}
ADAPTERS = {
    "gptoss-base-lora": ("gptoss-base", {"target_modules": ATTENTION, "r": 2, "lora_alpha": 4,
                                         "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "mixtral-base-lora": ("mixtral-base", {"target_modules": ATTENTION, "r": 2, "lora_alpha": 4,
                                           "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "phi3-base-lora": ("phi3-base", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "glm4-base-lora": ("glm4-base", {"target_modules": [*ATTENTION, "gate_up_proj", "down_proj"]}),
    "gemma2-base-lora": ("gemma2-base", {"target_modules": SEVEN}),
    "gemma3-base-lora": ("gemma3-base", {"target_modules": SEVEN}),
}


def as_kimi(model, folder):
    """The same tensors under the name of the family; its class is DeepSeek-V3's."""
    config = json.loads((folder / "config.json").read_text())
    write_config(folder, config | {"model_type": "kimi_k2"})


LAYOUTS = {"kimi-base": (as_kimi,), "mistral-window": (layouts.mistral3,), "qwen3vl-base": (layouts.qwen3_vl,), "qwen3vlmoe-base": (layouts.qwen3_vl,), "gemma3-base": (layouts.gemma3,)}
MIXTRAL = [(".mlp.", ".block_sparse_moe."), (".experts.down_proj", ".experts.w2")]
# What a parameter in memory is called in the files: parts of names.
RENAMED = {
    "mixtral-base": MIXTRAL,
    "mixtral-aux": MIXTRAL,
    "granitemoe-base": [(".experts.gate_up_proj", ".input_linear.weight"), (".experts.down_proj", ".output_linear.weight"),
                        (".router.weight", ".router.layer.weight")],
    "qwen3vl-base": [("model.", "model.language_model.")],
    "qwen3vlmoe-base": [("model.", "model.language_model.")],
}
# The rotation of `phi3-long` changes while a text grows past the length that it was made for.
sparse.GENERATES.update(MODELS.keys() - {"phi3-long"})
sparse.MODELS.update(MODELS)
sparse.ADAPTERS.update(ADAPTERS)
sparse.LAYOUTS.update(LAYOUTS)
sparse.RENAMED.update(RENAMED)
