"""Record `ratelimitd demo` for a minute into an animated SVG: a real run, with two edits of the limit.

`make recording` writes docs/pictures/demo.svg.
"""

import argparse
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from html import escape
from pathlib import Path

import pyte

COMMAND = str(Path(sys.executable).with_name("ratelimitd"))
COLUMNS, ROWS = 80, 12
SECONDS = 60
EDITS = {15: 15, 40: 2}
"""Limits by the second at which they are set."""

CELL_PX, LINE_PX, MARGIN_PX = 8.43, 19, 14
STYLE = """\
svg{{background:#14161a}}text{{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#d8dee9;white-space:pre}}
.typed{{fill:#a3be8c}}.frames{{animation:p {seconds}s steps({frames}) infinite}}
@keyframes p{{to{{transform:translateY(-{height}px)}}}}
@media (prefers-reduced-motion:reduce){{.frames{{animation:none}}}}"""


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the SVG to write")
    file = parser.parse_args().file
    frames = record()
    file.write_text(drawn(frames))
    print(f"{file}: {len(frames)} frames, {file.stat().st_size // 1024} KiB")
    return 0


def record() -> list[list[str]]:
    """Return the lines of the terminal at each second of a run."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm"}
    demo = subprocess.Popen(
        [COMMAND, "demo", "--no-browser"], stdin=theirs, stdout=theirs, env=environment
    )
    frames: list[list[str]] = []
    typed = ""
    try:
        read_until(ours, stream, time.monotonic() + 30, lambda: "DENIED/S" in screen.display[7])
        started_s = time.monotonic()
        for second in range(SECONDS):
            if limit := EDITS.get(second):
                arguments = ["rules", "update", "/orders", "user", "--limit", str(limit)]
                subprocess.run([COMMAND, *arguments], check=True, capture_output=True)
                typed = f"$ ratelimitd {' '.join(arguments)}"
            read_until(ours, stream, started_s + second + 1)
            frames.append([*(line.rstrip() for line in screen.display), typed])
    finally:
        demo.terminate()
        demo.wait()
    return frames


def read_until(
    terminal: int,
    stream: pyte.ByteStream,
    end_s: float,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Feed the command's output to the screen until a time, or until ``is_enough``."""
    while not is_enough() and (left_s := end_s - time.monotonic()) > 0:
        if select.select([terminal], [], [], left_s)[0]:
            stream.feed(os.read(terminal, 65_536))


def drawn(frames: list[list[str]]) -> str:
    """Return an SVG that shows one frame a second; contains repeated lines only once."""
    height = round((ROWS + 1) * LINE_PX + 2 * MARGIN_PX)
    width = round(COLUMNS * CELL_PX + 2 * MARGIN_PX)
    distinct = dict.fromkeys(line for frame in frames for line in frame)
    lines = {line: f"l{number}" for number, line in enumerate(distinct)}
    defined = [
        f'<text id="{name}" class="{"typed" if line.startswith("$") else ""}">{escape(line)}</text>'
        for line, name in lines.items()
        if line
    ]
    shown = [
        f'<use href="#{lines[line]}" x="{MARGIN_PX}" y="{number * height + MARGIN_PX + (row + 1) * LINE_PX}"/>'
        for number, frame in enumerate(frames)
        for row, line in enumerate(frame)
        if line
    ]
    style = STYLE.format(seconds=SECONDS, frames=len(frames), height=height * len(frames))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>ratelimitd demo: the limit of a greedy caller is edited twice</title>",
            f"<style>{style}</style><defs>",
            *defined,
            '</defs><g class="frames">',
            *shown,
            "</g></svg>\n",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
