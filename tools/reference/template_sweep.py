"""Compares chat templates with transformers: many templates times many conversations, text for text.

    cargo build --release -p isobit-training --example render_template
    python tools/reference/template_sweep.py target/release/examples/render_template FOLDER...

The folders are searched for `*.jinja` and for `tokenizer_config.json` with a template in it; published ones are read where
they lie and are no part of the repository. A case agrees when both give the same text, or both refuse. Needs transformers.
"""

import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

from transformers.utils import chat_template_utils

DATE = datetime.datetime(2025, 1, 1)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PROPERTIES = {
    "place": {"type": "string", "description": "Where \"it\" is: über <b>"},
    "days": {"type": "integer", "minimum": 1, "default": 3},
    "ratio": {"type": ["number", "null"], "enum": [0.1, 1e-07, 123.09510907566857]},
    "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["place"]},
        "return": {"type": "string", "description": "text"},
    },
}
UNIONS = {
    "type": "function",
    "function": {
        "name": "unions",
        "description": "Types of every kind",
        "parameters": {
            "type": "object",
            "properties": {
                "one": {"oneOf": [{"type": "string", "default": "a"}, {"type": "number", "description": "n", "default": 2}]},
                "objects": {"oneOf": [{"type": "object"}, {"type": "string"}]},
                "unit": {"type": "string", "enum": ["celsius", "kelvin"], "default": "kelvin"},
                "inner": {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "string", "nullable": True}}, "required": ["a"]},
                "strings": {"type": "array", "items": {"type": "string"}, "nullable": True},
                "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "some": {"type": ["string"], "default": [1, {"k": None}]},
                "free": {"description": "anything"},
            },
            "required": ["one"],
        },
    },
}
PLAIN_TOOL = {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(arguments, name="weather", identifier="call12345"):
    return {"type": "function", "id": identifier, "function": {"name": name, "arguments": arguments}}


def conversations():
    """Rows: messages, and perhaps tools and variables of the template."""
    question, answer = said("user", "What is 1 + 1?"), said("assistant", "Two.")
    system = said("system", "  Be brief.\n")
    yield {"messages": [question]}
    yield {"messages": [question, answer]}
    yield {"messages": [system, question, answer]}
    yield {"messages": [system, question, answer, said("user", "And\n2 + 2?"), said("assistant", " Four. \n")]}
    yield {"messages": [said("user", ""), said("assistant", "")]}
    yield {"messages": [system]}
    yield {"messages": [said("assistant", "Hello"), question]}
    yield {"messages": [question, question, answer]}
    yield {"messages": [question, answer, answer]}
    yield {"messages": [system, system, question]}
    yield {"messages": [question, system, answer]}
    yield {"messages": [said("developer", "Dev."), question, answer]}
    yield {"messages": [said("stranger", "Hm."), answer]}
    yield {"messages": [said("user", "日本語 🙂 \u00a0<|im_end|> 'q' \"d\" {{ x }} {% y %}"), said("assistant", "ok\\n")]}
    yield {"messages": [question, said("assistant", "<think>\nhm\n</think>\n\nTwo.")]}
    yield {"messages": [question, said("assistant", "<think>\nhm\n</think>\n\nTwo."), question, answer]}
    yield {"messages": [question, said("assistant", "Two.", reasoning_content="hm\n"), question, answer]}
    yield {"messages": [question, said("assistant", "Two.", reasoning_content="hm\n")]}
    yield {"messages": [said("user", "x /no_think"), said("assistant", "<think></think>y")]}
    for tools in ([TOOL], [TOOL, PLAIN_TOOL], []):
        yield {"messages": [system, question, answer], "tools": tools}
        yield {"messages": [question, answer, question], "tools": tools}
    arguments = {"place": "Zürich", "days": 2, "ratio": 1e-07, "deep": {"a": [1, None, True, 1e20]}, "big": 2**70}
    used = [question, said("assistant", "", tool_calls=[call(arguments)]), said("tool", "Sunny", name="weather", tool_call_id="call12345")]
    yield {"messages": used, "tools": [TOOL]}
    yield {"messages": [system, *used, answer], "tools": [TOOL]}
    yield {"messages": [*used, said("tool", "{\"t\": 3.50}", name="weather", tool_call_id="call12345"), answer], "tools": [TOOL]}
    yield {"messages": [*used, answer, question, answer]}
    both = said("assistant", "I look.", tool_calls=[call(arguments), call({}, "now", "call67890")])
    yield {"messages": [question, both, used[2], said("tool", "12:00", name="now", tool_call_id="call67890"), answer], "tools": [TOOL, PLAIN_TOOL]}
    text = said("assistant", None, tool_calls=[call(json.dumps(arguments))])
    yield {"messages": [question, text, used[2], answer], "tools": [TOOL]}
    thought = said("assistant", "", reasoning_content="I need it.", tool_calls=[call({"place": "Bern"})])
    yield {"messages": [question, thought, used[2], answer], "tools": [TOOL]}
    yield from thoughts(question, answer, used)
    for extra in ({"enable_thinking": False}, {"enable_thinking": True}, {"thinking": True}, {"reasoning_effort": "high"}):
        yield {"messages": [system, question, answer, question], "chat_template_kwargs": extra}
    yield {"messages": [question], "chat_template_kwargs": {"custom_tools": [TOOL], "builtin_tools": ["x"]}}
    yield {"messages": [question, answer] * 20}
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " this? "}]
    yield {"messages": [said("user", parts), answer]}
    yield {"messages": [system, said("user", parts), said("assistant", parts), question]}


def thoughts(question, answer, used):
    """What gpt-oss reads: thoughts in a field of their own, calls without content, its own tools, and types of every kind."""
    yield {"messages": [question, said("assistant", "Two.", thinking="One and one.")]}
    yield {"messages": [question, said("assistant", "Two.", thinking="One and one."), question, answer]}
    yield {"messages": [question, said("assistant", "<|channel|>final<|message|>Two.")]}
    bare = {"role": "assistant", "thinking": "I look.", "tool_calls": [call({"place": "Bern", "days": 2})]}
    yield {"messages": [question, bare, used[2]], "tools": [UNIONS]}
    yield {"messages": [question, bare, used[2], answer], "tools": [UNIONS, TOOL]}
    yield {"messages": [question, {**bare, "content": "Both."}, used[2]], "tools": [UNIONS]}
    for tools in (["browser"], ["python"], ["browser", "python"]):
        extra = {"builtin_tools": tools, "model_identity": "You are Ada.", "reasoning_effort": "low"}
        yield {"messages": [question, answer], "chat_template_kwargs": extra}
        yield {"messages": [said("developer", "Dev."), question], "tools": [UNIONS], "chat_template_kwargs": extra}


def templates(folders):
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix == ".jinja":
                yield str(path), path.read_text(encoding="utf-8")
            elif path.name == "tokenizer_config.json":
                template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
                if isinstance(template, list):
                    for entry in template:
                        yield f"{path}:{entry['name']}", entry["template"]
                elif template:
                    yield str(path), template


def reference(source, row):
    class Pinned(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return DATE

    chat_template_utils.datetime = Pinned
    variables = {**SPECIAL, **row.get("chat_template_kwargs", {})}
    try:
        rendered = chat_template_utils.render_jinja_template(
            conversations=[row["messages"]],
            tools=row.get("tools"),
            chat_template=source,
            add_generation_prompt=row["add_generation_prompt"],
            **variables,
        )
        return rendered[0][0], None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def main():
    program, *folders = sys.argv[1:]
    rows = [{**row, "add_generation_prompt": prompt} for row in conversations() for prompt in (False, True)]
    agree = refused = compared = 0
    seen = set()
    with tempfile.TemporaryDirectory() as scratch:
        special = pathlib.Path(scratch, "special.json")
        special.write_text(json.dumps(SPECIAL))
        for name, source in templates(folders):
            if source in seen:
                continue
            seen.add(source)
            path = pathlib.Path(scratch, "template.jinja")
            path.write_text(source, encoding="utf-8", newline="")
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            ran = subprocess.run([program, path, special, f"{DATE:%Y-%m-%d}"], input=lines.encode(), capture_output=True)
            if ran.returncode != 0:
                sys.exit(f"{name}: the program fails: {ran.stderr.decode()}")
            found = [json.loads(line) for line in ran.stdout.decode().split("\n") if line]
            differ = []
            for row, mine in zip(rows, found, strict=True):
                text, error = reference(source, row)
                compared += 1
                if text == mine.get("text"):
                    agree += 1
                    refused += text is None
                else:
                    differ.append((row, mine, text, error))
            if differ:
                row, mine, text, error = differ[0]
                print(f"{name}: {len(differ)} of {len(rows)} differ; first: {json.dumps(row)[:300]}")
                print(f"   here: {mine.get('error') or around(mine['text'], text)}")
                print(f"   reference: {error or around(text, mine.get('text'))}")
    print(f"{len(seen)} templates, {len(rows)} conversations: {agree} of {compared} agree, {refused} of them refused by both")


def around(text, other):
    if other is None:
        return repr(text[-200:])
    at = next((at for at, pair in enumerate(zip(text, other)) if pair[0] != pair[1]), min(len(text), len(other)))
    return f"at {at}: {text[max(0, at - 40):at + 80]!r}"


if __name__ == "__main__":
    main()
