"""Writes what the tests of chat templates compare with: renderings, tokens and assistant masks of `transformers`.

Needs transformers, jinja2 and tokenizers (the versions are written into the result). Run it from the root of the
repository after changing a template or a conversation; it rewrites two files under crates/training/tests/fixtures:

    python tools/reference/chat_templates.py
"""

import datetime
import json
import pathlib

import jinja2
import tokenizers
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.utils import chat_template_utils

FIXTURES = pathlib.Path("crates/training/tests/fixtures")
DATE = datetime.datetime(2025, 1, 1)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
CORPUS = [
    "The assistant answers the question of the user, and the user asks another question.",
    "What is the weather in Paris? It is sunny in Paris, and it will be sunny there tomorrow.",
    "There are three apples and four pears. How many are there? There are seven of them.",
    "system user assistant tool content name arguments function think answer",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, \"now\" <or> later & über",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2, "part": 0.5}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


CONVERSATIONS = {
    "one question": [user("What is the weather?"), assistant("It is sunny.")],
    "with system": [system("Be brief."), user("How many?"), assistant("Seven.")],
    "several turns": [user("One"), assistant("1"), user("Two"), assistant("2"), user("Three"), assistant("3")],
    "prompt only": [user("Are you there?")],
    "white space": [system("  padded \n"), user("\n\nline\n"), assistant("  a\n\nb  \n")],
    "unicode": [user("Grüße, 世界! e\u0301 \U0001f600"), assistant("Zurück: é 👩‍👩‍👧 \u00a0ﬁ")],
    "quotes": [user("it's \"quoted\" \\ back <b>&amp;</b>"), assistant("{{ not a template }} {% if %}")],
    "empty answer": [user("Say nothing"), assistant("")],
    "tools": [
        user("Weather in Zürich?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "{\"sky\": \"blue\"}"},
        assistant("Blue."),
    ],
    "two results": [
        user("Both?"),
        assistant("I look.", tool_calls=[CALL]),
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        assistant("Done."),
    ],
    "thinking": [
        user("First"),
        assistant("<think>\nold thoughts\n</think>\n\nanswer one"),
        user("Second"),
        assistant("<think>\nnew thoughts\n</think>\n\nanswer two"),
    ],
    "reasoning field": [user("Why?"), assistant("Because.", reasoning="Let me think.")],
    "two users": [user("a"), user("b"), assistant("c")],
    "strange role": [user("a"), {"role": "critic", "content": "b"}, assistant("c")],
}


def build_tokenizer():
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    pattern = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


class Pinned(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


def render(tokenizer, source, name, messages, tools, prompt):
    entry = {"template": name, "messages": messages, "tools": tools, "prompt": prompt}
    try:
        texts, spans = chat_template_utils.render_jinja_template(
            conversations=[chat_template_utils._alias_reasoning_fields(messages)],
            tools=tools,
            chat_template=source,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask="endgeneration" in source,
            **tokenizer.special_tokens_map,
        )
    except jinja2.exceptions.TemplateError as error:
        return {**entry, "error": str(error)}
    entry["text"] = texts[0]
    tokenizer.chat_template = source
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=prompt,
        return_dict=True,
        return_assistant_tokens_mask="endgeneration" in source,
    )
    entry["tokens"] = encoded["input_ids"]
    if spans:
        # transformers counts characters; so does this file.
        entry["spans"] = spans[0]
        entry["mask"] = encoded["assistant_masks"]
    return entry


def main():
    chat_template_utils.datetime = Pinned
    build_tokenizer().save(str(FIXTURES / "tokenizer.json"), pretty=False)
    with open(FIXTURES / "tokenizer.json", "a") as file:
        file.write("\n")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(FIXTURES / "tokenizer.json"), bos_token="<|begin_of_text|>", eos_token="<|endoftext|>"
    )
    cases = []
    for path in sorted((FIXTURES / "templates").glob("*.jinja")):
        source = path.read_text()
        for title, messages in CONVERSATIONS.items():
            for prompt in [False, True]:
                cases.append({"title": title, **render(tokenizer, source, path.stem, messages, None, prompt)})
            if title in ["one question", "tools"]:
                cases.append({"title": title + ", tools", **render(tokenizer, source, path.stem, messages, [TOOL], False)})
    versions = {package.__name__: package.__version__ for package in [transformers, jinja2, tokenizers]}
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    head = json.dumps({"versions": versions, "date": DATE.date().isoformat(), "special": special})
    with open(FIXTURES / "rendered.json", "w") as file:
        lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
        file.write(head[:-1] + ', "cases": [\n' + lines + "\n]}\n")
    print(f"{len(cases)} cases, {sum('error' in case for case in cases)} errors")


if __name__ == "__main__":
    main()
