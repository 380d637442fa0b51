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


def qwen3_vl(model, folder):
    """In place of the model's own files: as published, the text model beside a vision tower. Stacked experts are transposed."""
    generator, sparse = torch.Generator().manual_seed(7), hasattr(model.config, "num_experts")
    inner = {name.replace("model.", "model.language_model.", 1): tensor.transpose(1, 2) if ".experts." in name else tensor
             for name, tensor in stacked(model).items()}
    kind, name = ("Qwen3VLMoe", "qwen3_vl_moe") if sparse else ("Qwen3VL", "qwen3_vl")
    skipped = {"model.visual.patch_embed.proj.weight": noise(generator, 8, 3, 2, 4, 4),
               "model.visual.blocks.0.attn.qkv.weight": noise(generator, 24, 8),
               "model.visual.deepstack_merger_list.0.linear_fc1.weight": noise(generator, 32, 32)}
    write_tensors(folder / "model.safetensors", inner | skipped)
    text = json.loads((folder / "config.json").read_text())
    rotation = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = text | {"model_type": f"{name}_text", "rope_parameters": rotation}
    for key in ("architectures", "layer_types", "max_window_layers", "norm_topk_prob", "sliding_window", "transformers_version",
                "use_sliding_window"):
        text.pop(key, None)
    vision = {"model_type": name, "depth": 1, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": model.config.hidden_size, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    write_config(folder, {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": name, "dtype": "float32",
                          "image_token_id": 36, "video_token_id": 35, "vision_start_token_id": 33, "vision_end_token_id": 34,
                          "tie_word_embeddings": False, "text_config": text, "vision_config": vision,
                          "transformers_version": transformers.__version__})
    assert_same_logits(getattr(transformers, f"{kind}ForConditionalGeneration"), folder, model)


def below_language_model(model, folder, skipped):
    """As the first files of Llava's kind have it: everything below `language_model.`. Returns the config of the text model."""
    generator = torch.Generator().manual_seed(7)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    inner = {f"language_model.{name}": tensor for name, tensor in stacked(model).items() if name not in tied}
    (folder / "wrapped").mkdir()
    write_tensors(folder / "wrapped" / "model.safetensors",
                  inner | {name: noise(generator, *shape) for name, shape in skipped.items()})
    text = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "transformers_version"):
        text.pop(key)
    return text


def mistral3(model, folder):
    """Mistral Small: beside a vision tower and a projector."""
    text = below_language_model(model, folder, {"vision_tower.patch_conv.weight": (8, 3, 4, 4),
                                                "multi_modal_projector.norm.weight": (8,)})
    vision = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "head_dim": 4, "patch_size": 4, "image_size": 8}
    write_config(folder / "wrapped", {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                                      "dtype": "float32", "image_token_index": 36, "spatial_merge_size": 1, "text_config": text,
                                      "vision_config": vision, "transformers_version": transformers.__version__})
    assert_same_logits(transformers.Mistral3ForConditionalGeneration, folder / "wrapped", model)


def gemma3(model, folder):
    """Beside a vision tower and a projector."""
    text = below_language_model(model, folder, {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (8, 3, 4, 4),
        "multi_modal_projector.mm_input_projection_weight": (8, model.config.hidden_size)})
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "patch_size": 4, "image_size": 8, "vision_use_head": False}
    write_config(folder / "wrapped", {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "dtype": "float32",
                                      "mm_tokens_per_image": 1, "boi_token_index": 34, "eoi_token_index": 35, "image_token_index": 36,
                                      "text_config": text, "vision_config": vision, "transformers_version": transformers.__version__})
    assert_same_logits(transformers.Gemma3ForConditionalGeneration, folder / "wrapped", model)


def assert_same_logits(kind, folder, model):
    """The multimodal class reads the folder as the text model. Its vision tower is not whole, and not used."""
    loaded = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
