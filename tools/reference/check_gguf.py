"""Compares a GGUF file of `isobit export gguf` with the model folder it was made from, byte by byte.

    check_gguf.py FILE.gguf FOLDER [TYPE]

The `gguf` package reads every key and tensor. Tensors must be what that package makes of the folder's numbers in the format that the
file lists for them, and the tokens those of the folder's tokenizer. For a merged model, FOLDER is what `export merge --dtype f32` wrote.
"""
import json
import sys

import gguf
import numpy as np
import torch
from safetensors import safe_open

MODULES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
           "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
           "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
           "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def interleaved(rows, heads):
    width = rows.shape[0] // heads
    return rows.reshape(heads, 2, width // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def expected(name, folder, config):
    """The folder's numbers of one of the file's tensors, float32."""
    get = lambda tensor: folder.get_tensor(tensor).to(torch.float32).numpy()
    parts = name.split(".")
    if parts[0] != "blk":
        return get(f"{ENDS[parts[0]]}.{parts[1]}")
    layer = f"model.layers.{parts[1]}"
    if parts[2] in EXPERTS:
        count = config["num_experts"]
        return np.stack([get(f"{layer}.mlp.experts.{expert}.{EXPERTS[parts[2]]}.weight") for expert in range(count)])
    values = get(f"{layer}.{MODULES[parts[2]]}.{parts[3]}")
    if config["model_type"] == "llama" and parts[2] in ("attn_q", "attn_k"):
        values = interleaved(values, config["num_attention_heads" if parts[2] == "attn_q" else "num_key_value_heads"])
    return values


def main(path, folder, wanted=None):
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    config = json.load(open(f"{folder}/config.json"))
    model = safe_open(f"{folder}/model.safetensors", "pt")
    kinds = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        values = np.ascontiguousarray(expected(tensor.name, model, config))
        assert list(reversed(tensor.shape)) == list(values.shape), (tensor.name, tensor.shape, values.shape)
        bytes_of = gguf.quants.quantize(values, tensor.tensor_type).tobytes()
        assert bytes_of == tensor.data.tobytes(), tensor.name
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
    assert wanted is None or wanted.upper() in kinds, kinds
    tokens, vocabulary = keys["tokenizer.ggml.tokens"], json.load(open(f"{folder}/tokenizer.json"))
    for token, id in vocabulary["model"]["vocab"].items():
        assert tokens[id] == token, (id, token)
    for added in vocabulary["added_tokens"]:
        assert tokens[added["id"]] == added["content"], added
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["model"]["merges"]]
    assert keys["tokenizer.ggml.merges"] == merges
    print(f"{path}: {len(keys)} keys, {len(reader.tensors)} tensors as the package makes them: {kinds}")
    for name, value in keys.items():
        if not isinstance(value, list):
            print(f"  {name} = {str(value)[:80]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
