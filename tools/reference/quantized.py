"""Cases whose base is stored in few bits: GPTQ (4 bits, both conventions for zero points), AWQ, bitsandbytes, blocks of FP8 and MXFP4. LoRA on top.

bitsandbytes (0.50.2, on the CPU) packs its own cases and says what they stand for. Nothing here needs a library for GPTQ or AWQ: weights are quantised by rounding, packed as the format says, and the judge runs transformers'
float32 model on the weights that the packed tensors stand for. Everything that is not quantised is float16 (GPTQ) or bfloat16 (FP8).
"""
import copy
import json
import pathlib

import families
import sparse
import torch
import transformers
from dense import SEVEN, rope
from safetensors.torch import load_file
from writing import FIXTURES, adapt, fresh, randomize_constants, save_adapter, write_config, write_tensors

FP8_BLOCK = 128
SMALL = {"vocab_size": sparse.VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
         "max_position_embeddings": 128, "initializer_range": 0.1, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}


def qwen2():
    return transformers.Qwen2Config(**SMALL | rope(1e4) | {"intermediate_size": 96})


def qwen2_in_blocks():
    """Rows of whole blocks of 64: elsewhere bitsandbytes' CPU kernel takes other blocks than its quantiser."""
    return transformers.Qwen2Config(**SMALL | rope(1e4) | {"intermediate_size": 128})


def qwen3_moe():
    return transformers.Qwen3MoeConfig(**SMALL | rope(1e4) | {"head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 32,
                                                              "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True})


def deepseek():
    return sparse.deepseek(**rope(1e4), hidden_size=144, intermediate_size=136, num_hidden_layers=2, initializer_range=0.1,
                           n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1)


# Folder: config, zero points of version 1 or 2, symmetric, group size, order of groups shuffled, targets of LoRA.
GPTQ = {
    "gptq-v1": (qwen2, {"version": 1, "sym": True, "group_size": 32, "desc_act": False}, SEVEN),
    "gptq-v1-asymmetric": (qwen2, {"version": 1, "sym": False, "group_size": 32, "desc_act": True}, SEVEN),
    "gptq-v2-order": (qwen2, {"version": 2, "sym": False, "group_size": 32, "desc_act": True}, SEVEN),
    "gptq-v2-whole": (qwen2, {"version": 2, "sym": False, "group_size": -1, "desc_act": False}, SEVEN),
    "gptq-moe": (qwen3_moe, {"version": 1, "sym": True, "group_size": 32, "desc_act": False}, sparse.ATTENTION),
    "gptq-moe-order": (qwen3_moe, {"version": 2, "sym": False, "group_size": 32, "desc_act": True}, sparse.ATTENTION),
}
# AWQ's packing "gemm"; the second leaves a projection as it is.
AWQ = {
    "awq": (qwen2, {"version": "awq", "sym": False, "group_size": 32, "desc_act": False, "plain": None}, SEVEN),
    "awq-moe": (qwen3_moe, {"version": "awq", "sym": False, "group_size": 32, "desc_act": False, "plain": "o_proj"}, sparse.ATTENTION),
}
# Type, and whether the magnitudes are quantised too.
BITSANDBYTES = {"nf4": (qwen2_in_blocks, {"type": "nf4", "nested": True}, SEVEN),
                "fp4": (qwen2_in_blocks, {"type": "fp4", "nested": False}, SEVEN)}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
# With group_size -1 there is one group, and the list that says so is left out of the file.
WITHOUT_GROUP_INDEX = {"gptq-v2-whole"}
TRAINED = {"gptq-v2-order", "gptq-moe"}
FP8 = {"deepseek-fp8": (deepseek, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])}


def linears(model):
    """Name and weight [out, in] of everything that gets quantised; stacked experts under the names they have in files."""
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith("mlp.experts.gate_up_proj"):
            for expert, weight in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2)):
                    yield name.replace("gate_up_proj", f"{expert}.{part}"), half
        elif name.endswith("mlp.experts.down_proj"):
            for expert, weight in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.down_proj"), weight
        elif name.endswith("_proj.weight") or name.endswith("_with_mqa.weight"):
            yield name.removesuffix(".weight"), tensor


def spread(weight, generator):
    """Rows and columns of different size, so that a scale taken from the wrong group or block shows."""
    rows, columns = (torch.randn(shape, generator=generator).mul(0.5).exp() for shape in ((len(weight), 1), (1, weight.shape[1])))
    return weight * rows * columns


def quantise(weight, group_index, settings):
    """Whole numbers 0 to 15 [in, out], scales and zero points [groups, out]; weight = scale * (number - zero)."""
    weight = weight.T
    groups = int(group_index.max()) + 1
    scales, zeros = torch.empty(groups, weight.shape[1], dtype=torch.float16), torch.empty(groups, weight.shape[1], dtype=torch.int32)
    for group in range(groups):
        part = weight[group_index == group]
        if settings["sym"]:
            scales[group], zeros[group] = (part.abs().amax(0) / 7.5).half(), 8
        else:
            low, high = part.amin(0).clamp(max=0), part.amax(0).clamp(min=0)
            scales[group] = ((high - low) / 15).half()
            # Version 1 stores the zero point less one: 0 would borrow from the neighbour, so it is not used there.
            zeros[group] = (-low / scales[group].float()).round().clamp(1 if settings["version"] == 1 else 0, 15).int()
    numbers = (weight / scales.float()[group_index]).round().int() + zeros[group_index]
    return numbers.clamp(0, 15), scales, zeros


def pack(numbers):
    """Eight numbers of four bits in each int32 along the first axis, the first in the lowest bits."""
    words = numbers.long().view(-1, 8, numbers.shape[1])
    words = sum(words[:, place] << (4 * place) for place in range(8))
    return (words - ((words >> 31) << 32)).int()


def unpack(words):
    return torch.stack([(words.long() >> (4 * place)) & 15 for place in range(8)], 1).flatten(0, 1)


def gptq_tensors(name, weight, settings, generator):
    """The tensors of one linear, and the weight they stand for."""
    inputs = weight.shape[1]
    group_size = inputs if settings["group_size"] == -1 else settings["group_size"]
    group_index = torch.arange(inputs) // group_size
    if settings["desc_act"]:
        group_index = group_index[torch.randperm(inputs, generator=generator)]
    numbers, scales, zeros = quantise(spread(weight, generator), group_index, settings)
    less = 1 if settings["version"] == 1 else 0
    tensors = {"qweight": pack(numbers), "qzeros": pack((zeros - less).T).T, "scales": scales, "g_idx": group_index.int()}
    value = scales.float()[group_index] * (numbers - zeros[group_index])
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, value.T


def pack_awq(numbers):
    """Eight numbers of four bits in each int32 along the second axis, in AWQ's order."""
    words = numbers.long().view(len(numbers), -1, 8)
    words = sum(words[:, :, output] << (4 * place) for place, output in enumerate(AWQ_ORDER))
    return (words - ((words >> 31) << 32)).int()


def unpack_awq(words):
    numbers = torch.empty(len(words), words.shape[1], 8, dtype=torch.long)
    for place, output in enumerate(AWQ_ORDER):
        numbers[:, :, output] = (words.long() >> (4 * place)) & 15
    return numbers.flatten(1)


def awq_tensors(name, weight, settings, generator):
    """The tensors of one linear, and the weight they stand for."""
    if settings["plain"] and name.endswith(settings["plain"]):
        return {f"{name}.weight": weight.half()}, weight
    group_index = torch.arange(weight.shape[1]) // settings["group_size"]
    numbers, scales, zeros = quantise(spread(weight, generator), group_index, settings)
    tensors = {"qweight": pack_awq(numbers), "qzeros": pack_awq(zeros), "scales": scales}
    value = scales.float()[group_index] * (numbers - zeros[group_index])
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, value.T


def bitsandbytes_tensors(name, weight, settings, generator):
    """What bitsandbytes makes of one linear, and the float32 numbers that it gives back."""
    from bitsandbytes import functional
    packed, state = functional.quantize_4bit(spread(weight, generator).contiguous(), blocksize=64,
                                             compress_statistics=settings["nested"], quant_type=settings["type"])
    value = functional.dequantize_4bit(packed, state)
    assert value.dtype == torch.float32
    # As saved from a model in bfloat16, to which bitsandbytes rounds what it expands.
    state.dtype = torch.bfloat16
    return {f"{name}.weight": packed} | {f"{name}.weight.{key}": part for key, part in state.as_dict(packed=True).items()}, value


def expanded_bitsandbytes(tensors, name):
    from bitsandbytes import functional
    start = f"{name}.weight."
    state = functional.QuantState.from_dict({key.removeprefix(start): part for key, part in tensors.items() if key.startswith(start)},
                                            device=torch.device("cpu"))
    state.dtype = torch.float32
    return functional.dequantize_4bit(tensors[f"{name}.weight"], state)


def fp8_tensors(name, weight, settings, generator):
    """Numbers of eight bits, one float32 scale for each block of 128 by 128 (less at the edges)."""
    weight = spread(weight, generator)
    scales = torch.stack([torch.stack([block.abs().max() / 448 for block in rows.split(FP8_BLOCK, 1)])
                          for rows in weight.split(FP8_BLOCK, 0)])
    each = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[: len(weight), : weight.shape[1]]
    numbers = (weight / each).to(torch.float8_e4m3fn)
    return {f"{name}.weight": numbers, f"{name}.weight_scale_inv": scales}, numbers.float() * each


def dequantised(tensors, name, version):
    """The weight of one linear, from the tensors of a file."""
    if f"{name}.weight.absmax" in tensors:
        return expanded_bitsandbytes(tensors, name)
    if f"{name}.qweight" not in tensors and f"{name}.weight_scale_inv" not in tensors:
        return tensors[f"{name}.weight"].float()
    if version == "awq":
        numbers, zeros = unpack_awq(tensors[f"{name}.qweight"]), unpack_awq(tensors[f"{name}.qzeros"])
        groups = torch.arange(len(numbers)) * len(zeros) // len(numbers)
        return (tensors[f"{name}.scales"].float()[groups] * (numbers - zeros[groups])).T
    if f"{name}.qweight" not in tensors:
        numbers, scales = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale_inv"]
        return numbers * scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[: len(numbers), : numbers.shape[1]]
    numbers, scales = unpack(tensors[f"{name}.qweight"]), tensors[f"{name}.scales"].float()
    groups = tensors.get(f"{name}.g_idx", torch.arange(len(numbers)) * len(scales) // len(numbers)).long()
    zeros = unpack(tensors[f"{name}.qzeros"].T).T + (1 if version == 1 else 0)
    return (scales[groups] * (numbers - zeros[groups])).T


def load(folder):
    """The float32 model that a quantised folder stands for."""
    folder = pathlib.Path(folder)
    tensors = load_file(folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    settings = described.pop("quantization_config")
    version = "awq" if settings["quant_method"] == "awq" else 2 if settings.get("checkpoint_format") == "gptq_v2" else 1
    config = transformers.AutoConfig.for_model(described.pop("model_type"), **described)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager",
                                                          dtype=torch.float32).eval()
    for name, _ in list(linears(model)):
        put(model, name, dequantised(tensors, name, version))
    plain = {name: tensors[name].float() for name in model.state_dict() if name in tensors and tensors[name].dtype not in (torch.float8_e4m3fn, torch.uint8)}
    model.load_state_dict(plain, strict=False)
    return model


def put(model, name, weight):
    """The weight a linear now stands for, at its place in the model."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        if ".mlp.experts." not in name:
            parameters[f"{name}.weight"].copy_(weight)
            return
        stem, expert, part = name.rsplit(".", 2)
        if part == "down_proj":
            parameters[f"{stem}.down_proj"][int(expert)].copy_(weight)
        else:
            parameters[f"{stem}.gate_up_proj"][int(expert)].chunk(2)[part == "up_proj"].copy_(weight)


def build(config, seed, tensors_of, settings, dtype):
    """A model, and the tensors of its file."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager",
                                                          dtype=torch.float32).eval()
    randomize_constants(model, seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    file = {}
    quantised = {f"{name}.weight" for name, _ in linears(model)}
    for name, weight in [(name, weight.clone()) for name, weight in linears(model)]:
        tensors, value = tensors_of(name, weight, settings, generator)
        put(model, name, value)
        file |= tensors
    for name, tensor in model.state_dict().items():
        if name not in quantised and ".mlp.experts." not in name and name not in file:
            file[name] = tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
    return model, file


def write(name, config, tensors_of, settings, dtype, quantization, targets):
    files = {}

    def make(seed):
        model, file = build(config(), seed, tensors_of, settings, dtype)
        files[seed] = file, copy.deepcopy(model)
        return adapt(model, name, {"r": 2, "lora_alpha": 4, "target_modules": targets}, seed), sparse.two_rows()

    found = sparse.search(name, make, name in TRAINED)
    seed, model = found[:2]
    folder = fresh(name)
    file = {key: tensor for key, tensor in files[seed][0].items() if not (name in WITHOUT_GROUP_INDEX and key.endswith(".g_idx"))}
    write_tensors(folder / "model.safetensors", file)
    plain = model.base_model.model
    plain.config.architectures = [type(plain).__name__]
    plain.config.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    write_config(folder, described | {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization})
    save_adapter(model, folder / "adapter")
    read = load(folder).state_dict()
    assert all(torch.equal(read[key], tensor) for key, tensor in files[seed][1].state_dict().items())
    sparse.finish(name, folder, found, "lora", name, name in TRAINED)


def make_gptq(name):
    config, settings, targets = GPTQ[name]
    described = {"bits": 4, "quant_method": "gptq", "checkpoint_format": "gptq" if settings["version"] == 1 else "gptq_v2",
                 "damp_percent": 0.01, "lm_head": False, "static_groups": False, "true_sequential": True, "pack_dtype": "int32"}
    described |= {key: settings[key] for key in ("group_size", "desc_act", "sym")}
    write(name, config, gptq_tensors, settings, torch.float16, described, targets)


def make_awq(name):
    config, settings, targets = AWQ[name]
    described = {"bits": 4, "quant_method": "awq", "group_size": settings["group_size"], "version": "gemm", "zero_point": True,
                 "modules_to_not_convert": [settings["plain"]] if settings["plain"] else None}
    write(name, config, awq_tensors, settings, torch.float16, described, targets)


def make_bitsandbytes(name):
    config, settings, targets = BITSANDBYTES[name]
    described = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": settings["type"],
                 "bnb_4bit_use_double_quant": settings["nested"], "bnb_4bit_compute_dtype": "bfloat16",
                 "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None}
    write(name, config, bitsandbytes_tensors, settings, torch.bfloat16, described, targets)
    folder = FIXTURES / name
    tensors = load_file(folder / "model.safetensors")
    paths = [key.removesuffix(".weight.absmax") for key in tensors if key.endswith(".weight.absmax")]
    assert len(paths) == len(SEVEN)
    write_tensors(folder / "expanded.safetensors", {f"{path}.weight": expanded_bitsandbytes(tensors, path) for path in paths})


def make_fp8(name):
    config, targets = FP8[name]
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    write(name, config, fp8_tensors, None, torch.bfloat16, described, targets)


def gpt_oss():
    return families.gpt_oss(**SMALL | {"head_dim": 32, "intermediate_size": 32, "num_hidden_layers": 2,
                                       "swiglu_limit": 7.0})


MXFP4 = {"gptoss-mxfp4": gpt_oss}
MXFP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_tensors(name, weight):
    """The parts of a tensor [experts, in, out]: codes of four bits and exponents for 32 along `in`; and what they stand for."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1, keepdim=True) / 6.0).log2().ceil()
    scaled = groups / exponents.exp2()
    codes = (scaled.abs()[..., None] - MXFP4_VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    scales = (exponents[..., 0] + 127).to(torch.uint8)
    value = transformers.integrations.mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(value, (MXFP4_VALUES[codes % 8] * (1 - 2 * (codes // 8)) * exponents.exp2()).flatten(2).transpose(1, 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, value


def make_mxfp4(name):
    files = {}

    def make(seed):
        model = sparse.build(MXFP4[name](), seed)
        file, generator = {}, torch.Generator().manual_seed(seed + 2)
        with torch.no_grad():
            for key, tensor in sorted(model.named_parameters()):
                tensor.copy_(tensor.to(torch.bfloat16))
                if key.endswith((".gate_up_proj", ".down_proj")):
                    parts, value = mxfp4_tensors(key, torch.stack([spread(expert, generator) for expert in tensor]))
                    tensor.copy_(value)
                    file |= parts
                else:
                    file[key] = tensor.to(torch.bfloat16)
        files[seed] = file
        settings = {"r": 2, "lora_alpha": 4, "target_modules": sparse.ATTENTION,
                    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
        return adapt(model, name, settings, seed), sparse.two_rows()

    found = sparse.search(name, make, True)
    seed, model = found[:2]
    folder = fresh(name)
    write_tensors(folder / "model.safetensors", files[seed])
    plain = model.base_model.model
    plain.config.architectures = [type(plain).__name__]
    plain.config.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    write_config(folder, described | {"dtype": "bfloat16", "quantization_config": quantization})
    save_adapter(model, folder / "adapter")
    sparse.finish(name, folder, found, "lora", name, True)


TABLES = ((GPTQ, make_gptq), (AWQ, make_awq), (BITSANDBYTES, make_bitsandbytes), (FP8, make_fp8), (MXFP4, make_mxfp4))
