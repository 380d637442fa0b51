"""Vocabularies in GGUF files: llama.cpp cuts texts into the tokens of tokenizer.json.

    NODE_MODULES=.../node_modules check_gguf_vocabulary.py TEXT_FILE...

Trains a vocabulary on the files (`pip install sentencepiece tokenizers`), writes it as tokenizer.json in the way of Llama 2 (a space in
front) and of Gemma (none), and byte-level ones with every expression that has a name in vocabulary.rs; exports a small random model with
each, and compares the tokens of every line, of some odd texts, and of random strings.
"""
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import sentencepiece
import tokenizers
import transformers
from check_gguf_families import DENSE, HERE, ISOBIT
from dense import rope
from sparse import build
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SIZE = 2000
ODD = ["", " ", "  two  spaces ", "tab\tand\nnewline\n\n", "é ü 日本語 emoji 🦀 \u200b", "x" * 40, "<s> </s> <0x0A>", "a<mark>b <mark> c", "   "]


def merges(model, ids):
    """Every pair that makes a piece, in the order of the pieces' scores."""
    found = []
    for piece, id in ids.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in ids and piece[at:] in ids]
        found += [(-model.get_score(id), id, ids[left], ids[right], (left, right)) for left, right in pairs if not model.is_byte(id)]
    return [pair for *_, pair in sorted(found)]


def tokenizer(model, leads):
    ids = {model.id_to_piece(id): id for id in range(len(model))}
    made = tokenizers.Tokenizer(models.BPE(ids, merges(model, ids), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if leads else replace
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([tokenizers.AddedToken(piece, special=True, normalized=False) for piece in ("<unk>", "<s>", "</s>")])
    if not leads:
        # llama.cpp puts a space in front of what follows such a token too.
        made.add_tokens([tokenizers.AddedToken("<mark>", special=False, normalized=False)])
    return made


def byte_level(splits, lines):
    made = tokenizers.Tokenizer(models.BPE())
    parts = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in splits]
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    made.add_special_tokens([tokenizers.AddedToken(piece, special=True, normalized=False) for piece in ("<s>", "</s>")])
    return made


def expressions():
    """Those of the program: names, and lists of expressions."""
    source = (HERE.parents[1] / "crates/training/src/export/gguf/vocabulary.rs").read_text()
    table = source[source.index("const EXPRESSIONS"):source.index("];\n\n/// The files")]
    found = re.findall(r'r"(.*?)",\n|r##"(.*?)"##,\n|^ {8}"([a-z0-9-]+)",$', table, re.M)
    splits = []
    for plain, quoted, name in found:
        if name:
            yield name, splits
            splits = []
        else:
            splits.append(plain or quoted)


SCRIPT = """
import {pathToFileURL} from "node:url"; import fs from "node:fs";
const {getLlama} = await import(pathToFileURL(`${process.env.NODE_MODULES}/node-llama-cpp/dist/index.js`).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: process.argv[2], vocabOnly: true});
const texts = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));
fs.writeFileSync(process.argv[4], JSON.stringify(texts.map((text) => model.tokenize(text, true))));
process.exit(0);
"""


def main(paths):
    random.seed(0)
    lines = [line for path in paths for line in pathlib.Path(path).read_text().splitlines()]
    letters = sorted({letter for line in lines for letter in line} | set("▁äß日🦀"))
    texts = lines + ODD[1:] + ["".join(random.choices(letters + [" "] * 20, k=random.randint(1, 60))) for _ in range(2000)]
    # What stands for a space in the vocabulary is not told from one by llama.cpp, nor by SentencePiece.
    texts = [text for text in texts if "▁" not in text and text]
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCRATCH")) as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "lines").write_text("\n".join(lines))
        sentencepiece.SentencePieceTrainer.train(input=scratch / "lines", model_prefix=str(scratch / "spm"), vocab_size=SIZE, model_type="bpe",
                                                 byte_fallback=True, character_coverage=0.999, minloglevel=2,
                                                 normalization_rule_name="identity", remove_extra_whitespaces=False)
        model = sentencepiece.SentencePieceProcessor(model_file=str(scratch / "spm.model"))
        (scratch / "texts.json").write_text(json.dumps(texts))
        (scratch / "tokens.mjs").write_text(SCRIPT)
        kinds = [("llama", tokenizer(model, True)), ("gemma", tokenizer(model, False))]
        kinds += [(name, byte_level(splits, lines)) for name, splits in expressions()]
        for name, made in kinds:
            folder = scratch / name
            small = transformers.LlamaConfig(**DENSE | rope(1e4) | {"vocab_size": SIZE + 2, "bos_token_id": 1, "eos_token_id": 2})
            build(small, 0).save_pretrained(folder)
            made.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}))
            subprocess.run([ISOBIT, "export", "gguf", folder, "--type", "f16", "-o", scratch / f"{name}.gguf"], check=True, stdout=subprocess.DEVNULL)
            ran = subprocess.run(["node", scratch / "tokens.mjs", scratch / f"{name}.gguf", scratch / "texts.json", scratch / "tokens.json"],
                                 capture_output=True, text=True)
            if ran.returncode:
                sys.exit(ran.stderr)
            theirs = json.loads((scratch / "tokens.json").read_text())
            wanted = [made.encode(text).ids for text in texts]
            wrong = [at for at in range(len(texts)) if theirs[at] != wanted[at]]
            print(f"{name}: {len(texts) - len(wrong)} of {len(texts)} texts ({sum(map(len, wanted))} tokens) are cut alike; "
                  f"{sum(texts[at].isascii() for at in wrong)} of the others are ASCII", flush=True)
            for at in wrong[:3]:
                print(f"  {texts[at]!r}\n    llama.cpp {[made.id_to_token(id) for id in theirs[at]]}\n    {made.encode(texts[at]).tokens}")


if __name__ == "__main__":
    main(sys.argv[1:])
