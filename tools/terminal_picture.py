#!/usr/bin/env python3
"""Records commands on a terminal and draws what they showed as an SVG: the picture in the README.

    tools/terminal_picture.py --program target/release/isobit -o docs/demo.svg demo

Everything after the options is one command line for the program; `--then ARGUMENTS` adds another. The commands run on a
pseudo-terminal of fixed width in an empty folder, and only what they print is drawn: nothing is edited but that lines longer than
the picture are cut with an ellipsis. Needs Python 3 and nothing else, on Linux or macOS.
"""

import argparse
import fcntl
import html
import os
import pathlib
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios

COLUMNS, FONT, WIDE, HIGH, MARGIN, BAR = 112, 13, 7.83, 18, 16, 30
# Background, bar, text, prompt, and what is worth looking at twice.
BACK, TOP, TEXT, PROMPT, BRIGHT = "#16191f", "#232831", "#d5d9e0", "#7fb4ff", "#8fd694"
HASH = re.compile(r"\b[0-9a-f]{32}\b")


def recorded(program, arguments, folder):
    """What the command shows on a terminal of COLUMNS columns, line by line, as it stands when the command has ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    child = subprocess.Popen([program, *arguments], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    if child.wait() != 0:
        sys.exit(f"`{shlex.join(arguments)}` ended with {child.returncode}:\n{shown.decode(errors='replace')}")
    return settled(shown.decode())


def settled(text):
    """Lines without control sequences; of a line that was drawn over, the last state."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        # A progress bar clears its line, or goes back to its start, and draws again.
        line = re.split(r"\x1b\[2?K|\r", line)[-1]
        lines.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip())
    while lines and not lines[-1]:
        lines.pop()
    return lines


def drawn(lines):
    """The SVG of lines, each with whether it is a prompt."""
    width, height = round(2 * MARGIN + COLUMNS * WIDE), BAR + 2 * MARGIN + len(lines) * HIGH
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="A recorded terminal session">',
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACK}"/>',
        f'<path d="M0 {BAR}V8a8 8 0 0 1 8-8H{width - 8}a8 8 0 0 1 8 8V{BAR}z" fill="{TOP}"/>',
    ]
    for index, colour in enumerate(["#ff6058", "#ffbd2e", "#28c941"]):
        out.append(f'<circle cx="{18 + 18 * index}" cy="{BAR // 2}" r="5" fill="{colour}"/>')
    out.append(
        f'<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="{FONT}" fill="{TEXT}">'
    )
    for index, (line, is_prompt) in enumerate(lines):
        if not line:
            continue
        # Viewers fold plain spaces.
        line = line.replace(" ", "\u00a0")
        line = line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
        text = HASH.sub(lambda found: f'<tspan fill="{BRIGHT}">{found.group()}</tspan>', html.escape(line, quote=False))
        if is_prompt:
            text = f'<tspan fill="{PROMPT}">$</tspan>' + text[1:]
        # The length keeps columns in place whatever font is found.
        y = BAR + MARGIN + HIGH * index + FONT
        out.append(f'<text x="{MARGIN}" y="{y}" textLength="{len(line) * WIDE:.1f}">{text}</text>')
    return "\n".join([*out, "</g>", "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", required=True, type=pathlib.Path)
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path)
    parser.add_argument("--then", action="append", default=[], metavar="ARGUMENTS")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    program, lines = arguments.program.resolve(), []
    with tempfile.TemporaryDirectory() as folder:
        for command in [arguments.command, *map(shlex.split, arguments.then)]:
            if lines:
                lines.append(("", False))
            lines.append((f"$ isobit {shlex.join(command)}", True))
            lines += [(line, False) for line in recorded(program, command, folder)]
    arguments.output.write_text(drawn(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
