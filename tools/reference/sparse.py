"""Mixture-of-experts and hybrid cases: Qwen3-MoE, Qwen3.5-MoE, Qwen3.5, Qwen3-Next and DeepSeek-V3.

The seed of a case is the first from 0 on whose routing is beyond doubt (`routing.py`) and whose gradients are steady. It stands in
case.json and is tried first when the case is made again. Parameters of experts are stacked, as transformers has them in memory;
files keep them one by one.
"""
import itertools
import json
import re
import sys

import judge
import layouts
import peft
import routing
import torch
import transformers
from dense import rope
from writing import (FIXTURES, adapt, assert_decay_rule, assert_loads, fresh, measure, number, old_config, randomize_constants, row,
                     save_adapter, save_model, write_case, write_json)

VOCABULARY = 37
# Two sizes bracket the profiles here, and `after` is left to `updates`: there are many tensors.
NOISE = (1e-4, 1e-7)
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256, "initializer_range": 0.2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
# Two value heads for each key head, of another width.
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 8,
         "linear_conv_kernel_dim": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
HALF = {"partial_rotary_factor": 0.5}
SECTIONS = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
# Relative to the largest of the tensor, under noise of 1e-4: a case that says less is not worth its bytes.
WORST_GRADIENT = 0.02
LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_moe(**more):
    return transformers.Qwen3MoeConfig(**SMALL | rope(1e4) | EXPERTS | {"num_experts_per_tok": 3, "head_dim": 8, "norm_topk_prob": True,
                                                                        "intermediate_size": 12} | more)


def qwen3_5_moe(*layers, **more):
    return transformers.Qwen3_5MoeTextConfig(**SMALL | DELTA | EXPERTS | rope(1e4, **HALF, **SECTIONS)
                                             | {"head_dim": 8, "shared_expert_intermediate_size": 8,
                                                "num_hidden_layers": len(layers), "layer_types": list(layers)} | more)


def qwen3_5(*layers, **more):
    return transformers.Qwen3_5TextConfig(**SMALL | DELTA | rope(1e4, **HALF, **SECTIONS)
                                          | {"head_dim": 8, "intermediate_size": 12,
                                             "num_hidden_layers": len(layers), "layer_types": list(layers)} | more)


def qwen3_next(*layers, **more):
    return transformers.Qwen3NextConfig(**SMALL | DELTA | EXPERTS | rope(1e4, **HALF)
                                        | {"head_dim": 8, "shared_expert_intermediate_size": 8, "intermediate_size": 12,
                                           "num_hidden_layers": len(layers), "layer_types": list(layers)} | more)


def yarn(**more):
    """Of the four frequencies one stays, one is divided by 40 and two are between."""
    return rope(1e2, rope_type="yarn", factor=40.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1, **more)


def deepseek(**more):
    return transformers.DeepseekV3Config(**SMALL | yarn(mscale=1.0, mscale_all_dim=1.0)
                                         | {"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1,
                                            "intermediate_size": 12, "moe_intermediate_size": 4, "n_routed_experts": 8, "n_group": 4,
                                            "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2, "q_lora_rank": 12,
                                            "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10} | more)


def tokens(length, seed):
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def two_rows(seed=11):
    """Different lengths, a prompt in each, a masked span in the first: 8 and 5 targets."""
    return [row(tokens(13, seed), [0, 1, 2, 7, 8]), row(tokens(7, seed + 1), [0, 1])]


def few_rows(seed=11):
    """For models of four layers: the fewer choices, the sooner all of them are clear."""
    return [row(tokens(9, seed), [0, 1, 6]), row(tokens(5, seed + 1), [0])]


def one_row(length=19, seed=11):
    return [row(tokens(length, seed), [0, 1, 2, 9, 10])]


def short_rows(seed=11):
    return [row(tokens(7, seed), [0, 1]), row(tokens(4, seed + 1), [0])]


# Where queries and keys of a short document are almost orthogonal, a norm divides by almost nothing; this much keeps it steady.
STEADY = {"rms_norm_eps": 1e-2}
HYBRID = (LINEAR, LINEAR, LINEAR, FULL)
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# Folder: the config of its model, its rows, and whether five updates are stored beside the gradients.
MODELS = {
    "qwen3moe-base": (lambda: qwen3_moe(), two_rows, True),
    "qwen3moe-raw": (lambda: qwen3_moe(norm_topk_prob=False, num_experts_per_tok=2), short_rows, False),
    "qwen3moe-mixed": (lambda: qwen3_moe(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1]), two_rows, False),
    "qwen3moe-aux": (lambda: qwen3_moe(**AUXILIARY), one_row, True),
    "qwen3_5moe-linear": (lambda: qwen3_5_moe(LINEAR), lambda: [row(tokens(5, 11), [0, 1])], False),
    "qwen3_5moe-full": (lambda: qwen3_5_moe(FULL), two_rows, False),
    "qwen3_5moe-hybrid": (lambda: qwen3_5_moe(*HYBRID, **STEADY), few_rows, False),
    "qwen3_5moe-two": (lambda: qwen3_5_moe(LINEAR, FULL, **STEADY), short_rows, True),
    "qwen3_5moe-aux": (lambda: qwen3_5_moe(LINEAR, FULL, **AUXILIARY, **STEADY), one_row, False),
    "qwen3_5-hybrid": (lambda: qwen3_5(*HYBRID, **STEADY), two_rows, False),
    "qwen3next-hybrid": (lambda: qwen3_next(*HYBRID, **STEADY, mlp_only_layers=[1]), few_rows, False),
    "deepseek-base": (lambda: deepseek(), two_rows, True),
    "deepseek-plain": (lambda: deepseek(**yarn(), q_lora_rank=None, rope_interleave=False, norm_topk_prob=False, n_group=2,
                                        topk_group=1, num_hidden_layers=2), two_rows, False),
    "deepseek-mscale": (lambda: deepseek(**yarn(mscale=0.7, mscale_all_dim=1.0), attention_bias=True, n_group=1, topk_group=1,
                                         num_hidden_layers=2), two_rows, False),
}
# The router's row of this expert is made so small that no token goes to it.
IDLE = {"qwen3moe-raw": "model.layers.0.mlp.gate.weight"}
OLD_CONFIG = {"deepseek-base": "type"}
# The same model in other files of its folder.
LAYOUTS = {"qwen3moe-base": (layouts.fused, layouts.transposed), "qwen3_5moe-hybrid": (layouts.wrapped,),
           "deepseek-mscale": (layouts.with_prediction_layer,)}

# Cases with a text that is continued, and those whose parameters have other names in the files than in memory.
GENERATES, RENAMED = set(), {}

# Folder: the model it runs, and its rows.
ROWS = {
    "qwen3_5moe-linear-64": ("qwen3_5moe-linear", lambda seed: [row(tokens(64, seed), [0, 1, 2])]),
    "qwen3_5moe-linear-65": ("qwen3_5moe-linear", lambda seed: [row(tokens(65, seed), [0, 1, 2])]),
    "qwen3_5moe-linear-130": ("qwen3_5moe-linear", lambda seed: [row(tokens(130, seed), [0, 1, 2])]),
    "qwen3_5moe-hybrid-packed": ("qwen3_5moe-hybrid", lambda seed: [row(tokens(15, seed), [1, 7], [5, 1, 9])]),
}

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
# Folder: the model it adapts, and the settings of LoRA.
ADAPTERS = {
    "qwen3moe-base-lora": ("qwen3moe-base", {"target_modules": ATTENTION}),
    "qwen3moe-base-experts": ("qwen3moe-base", {"target_modules": [], "r": 2, "lora_alpha": 4,
                                                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "qwen3_5moe-hybrid-lora": ("qwen3_5moe-hybrid", {"r": 2, "lora_alpha": 4, "target_modules": [
        "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", *ATTENTION, *SHARED]}),
    "qwen3next-hybrid-lora": ("qwen3next-hybrid", {"r": 2, "lora_alpha": 4, "target_modules": [
        "in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION]}),
    # peft takes names that end in gate_proj, up_proj or down_proj for those of experts one by one and targets the stacked ones instead
    # (for model types it lists: not Qwen3.5). As a parameter the weight of the shared experts is left alone; its keys are the usual ones.
    "deepseek-base-lora": ("deepseek-base", {
        "r": 2, "lora_alpha": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        "target_parameters": [f"{name.replace('expert', 'experts')}.weight" for name in SHARED]}),
}


def build(config, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager",
                                                          dtype=torch.float32).eval()
    randomize_constants(model, seed + 1)
    return model


def stored_seed(name):
    path = FIXTURES / name / "case.json"
    return json.loads(path.read_text()).get("seed") if path.exists() else None


def search(name, make, train):
    """The first seed whose routing is beyond doubt: its model and rows, and what the judge measured."""
    stored = stored_seed(name)
    tried = []
    for seed in itertools.count() if stored is None else itertools.chain([stored], itertools.count()):
        model, rows = make(seed)
        try:
            measured = measure(model, rows, train, NOISE)
            if name in IDLE:
                layer = re.search(r"layers\.(\d+)", IDLE[name])[1]
                if not routing.idle(measured[1]["routing"], 8)[layer]:
                    raise routing.Unsteady("every expert has a token")
            if max(measured[3]["1e-04"]["gradients"].values()) > WORST_GRADIENT:
                raise routing.Unsteady("gradients hang on a norm of almost nothing")
            print(f"{name}: seed {seed} after {len(tried)} others")
            return seed, model, rows, measured
        except routing.Unsteady as tie:
            tried.append(tie)
            print(f"{name}: seed {seed}: {tie}", file=sys.stderr, flush=True)
            assert len(tried) < 2000, name


def finish(name, folder, found, mode, base, train):
    """The files of a case with routers: as for a dense one, with what the routers did."""
    seed, model, rows, (result, exact, float32_error, noise) = found
    for errors in (float32_error, *noise.values()):
        errors.pop("after", None)
    more = {"seed": seed}
    if name in GENERATES:
        more["generation"] = judge.generation(model, rows[0])
    for part in RENAMED.get(name, ()):
        result, float32_error, noise = (renamed(found, *part) for found in (result, float32_error, noise))
    if routing.routers(model):
        table = routing.table(exact["routing"])
        write_json(folder / "routing.json", table)
        more["routing_margin"] = table["margin"]
    if getattr(model.config, "output_router_logits", False):
        with torch.no_grad():
            auxiliary = judge.forward(model, rows[0], judge.count_targets(rows)).aux_loss
            exact_auxiliary = auxiliary_loss(exact["routing"][0], model.config)
        assert len(rows) == 1 and abs(auxiliary.item() - exact_auxiliary.item()) < 1e-5
        more["auxiliary_loss"] = number(auxiliary, exact_auxiliary) | {"coefficient": model.config.router_aux_loss_coef}
    write_case(folder, (result, exact, float32_error, noise), rows, mode, base, train, **more)


def renamed(found, memory, file):
    """What was found of each parameter, by its name in the files."""
    if not isinstance(found, dict):
        return found
    return {key.replace(memory, file, 1): renamed(value, memory, file) for key, value in found.items()}


def auxiliary_loss(rows, config):
    """The load-balancing loss written out: experts times the product of share of choices and mean probability, over all layers."""
    calls = list(rows[0].values())
    tokens_seen = sum(len(call["logits"]) for call in calls)
    share = sum(torch.bincount(call["experts"].flatten(), minlength=config.num_local_experts).double() for call in calls) / tokens_seen
    mean = sum(call["logits"].double().softmax(-1).sum(0) for call in calls) / tokens_seen
    return config.num_local_experts * (share * mean).sum()


def make_model(name):
    config, rows, train = MODELS[name]

    def make(seed):
        model = build(config(), seed)
        if name in IDLE:
            with torch.no_grad():
                dict(model.named_parameters())[IDLE[name]][5] *= 0.05
        return model, rows()

    found = search(name, make, train)
    model, folder = found[1], fresh(name)
    assert_decay_rule(model)
    save_model(model, folder)
    assert_loads(folder, model)
    if name in OLD_CONFIG:
        old_config(folder, OLD_CONFIG[name])
    for write in LAYOUTS.get(name, ()):
        write(model, folder)
    finish(name, folder, found, "full", name, train)


def base_model(name):
    seed = stored_seed(name)
    assert seed is not None, f"make {name} first"
    return build(MODELS[name][0](), seed)


def make_rows(name):
    base, rows = ROWS[name]
    found = search(name, lambda seed: (base_model(base), rows(seed)), False)
    finish(name, fresh(name), found, "full", base, False)


def make_adapter(name):
    base, settings = ADAPTERS[name]
    found = search(name, lambda seed: (adapt(base_model(base), base, settings, seed), MODELS[base][1]()), True)
    model, rows, folder = *found[1:3], fresh(name)
    save_adapter(model, folder / "adapter")
    loaded = peft.PeftModel.from_pretrained(base_model(base), folder / "adapter").eval()
    assert torch.equal(judge.forward(loaded, rows[0]).logits, judge.forward(model, rows[0]).logits)
    finish(name, folder, found, "lora", base, True)


TABLES = ((MODELS, make_model), (ROWS, make_rows), (ADAPTERS, make_adapter))
