"""The same model in other files: stacked experts, transposed ones, inside a multimodal model, with a layer that predicts ahead.

Each but the last is a folder inside that of the model, with a config.json and a model.safetensors of its own; the judge's results
hold for it too.
"""
import json

import torch
import transformers
from safetensors.torch import load_file
from writing import assert_loads, save_model, write_config, write_tensors


def stacked(model):
    """Tensors as transformers names them in memory, experts stacked."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def fused(model, folder):
    """`experts.gate_up_proj` [experts, 2 x intermediate, hidden] and `experts.down_proj` [experts, hidden, intermediate]."""
    save_model(model, folder / "fused", save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(folder / "fused" / "model.safetensors"))
    assert_loads(folder / "fused", model)


def transposed(model, folder):
    """The same keys with [experts, hidden, 2 x intermediate] and [experts, intermediate, hidden]. No class reads it for this model.

    The config has `num_experts`, as published; transformers writes `num_local_experts`.
    """
    (folder / "transposed").mkdir()
    config = json.loads((folder / "config.json").read_text())
    write_config(folder / "transposed", config | {"num_experts": config.pop("num_local_experts")})
    write_tensors(folder / "transposed" / "model.safetensors",
                  {name: tensor.transpose(1, 2) if ".mlp.experts." in name else tensor for name, tensor in stacked(model).items()})


def noise(generator, *shape):
    return torch.randn(shape, generator=generator)


def wrapped(model, folder):
    """As published: text under `model.language_model.`, beside it a vision tower and a layer that predicts ahead, to be skipped."""
    generator = torch.Generator().manual_seed(7)
    inner = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
             for name, tensor in stacked(model).items()}
    hidden = model.config.hidden_size
    skipped = {
        "model.visual.patch_embed.proj.weight": noise(generator, 8, 3, 2, 4, 4),
        "model.visual.patch_embed.proj.bias": noise(generator, 8),
        "model.visual.blocks.0.attn.qkv.weight": noise(generator, 24, 8),
        "model.visual.blocks.0.norm1.weight": noise(generator, 8),
        "model.visual.merger.linear_fc2.weight": noise(generator, hidden, 32),
        "mtp.fc.weight": noise(generator, hidden, 2 * hidden),
        "mtp.norm.weight": noise(generator, hidden),
        "mtp.pre_fc_norm_embedding.weight": noise(generator, hidden),
        "mtp.layers.0.input_layernorm.weight": noise(generator, hidden),
        "mtp.layers.0.self_attn.q_proj.weight": noise(generator, 64, hidden),
        "mtp.layers.0.mlp.experts.gate_up_proj": noise(generator, 8, 8, hidden),
        "mtp.layers.0.mlp.experts.down_proj": noise(generator, 8, hidden, 4),
    }
    (folder / "wrapped").mkdir()
    write_tensors(folder / "wrapped" / "model.safetensors", inner | skipped)
    text = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "transformers_version"):
        text.pop(key)
    vision = transformers.models.qwen3_5_moe.configuration_qwen3_5_moe.Qwen3_5MoeVisionConfig(
        depth=1, hidden_size=8, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=hidden, num_position_embeddings=16)
    write_config(folder / "wrapped", {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "dtype": "float32",
        "image_token_id": 36, "video_token_id": 35, "vision_start_token_id": 33, "vision_end_token_id": 34,
        "tie_word_embeddings": False, "transformers_version": transformers.__version__,
        "text_config": text | {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"},
        "vision_config": vision.to_diff_dict() | {"model_type": "qwen3_5_moe"}})
    assert_loads(folder / "wrapped", model)


def with_prediction_layer(model, folder):
    """As published: one layer more than `num_hidden_layers` in the model's own file, to be skipped."""
    generator = torch.Generator().manual_seed(7)
    hidden, layer = model.config.hidden_size, model.config.num_hidden_layers
    skipped = {f"model.layers.{layer}.{name}": noise(generator, *shape) for name, shape in {
        "enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (model.config.vocab_size, hidden), "shared_head.norm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, 40), "mlp.gate.weight": (8, hidden), "mlp.gate.e_score_correction_bias": (8,)}.items()}
    path = folder / "model.safetensors"
    write_tensors(path, load_file(path) | skipped)
    assert_loads(folder, model)
