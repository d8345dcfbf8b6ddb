"""The Dockerfile as data, for the tests; tests/system builds it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final, NamedTuple

from tests.deploy.monitoring import ROOT

DOCKERFILE: Final = ROOT / "deploy/docker/Dockerfile"


class Instruction(NamedTuple):
    """One instruction, such as ``RUN`` and what follows it, as one line."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """What follows it, split as a shell does."""
        return shlex.split(self.text)


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, which begins with its ``FROM``; what stands before the first is left out."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    found: list[list[Instruction]] = []
    for line in filter(None, joined.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(name, rest.strip()))
    return found


def sent_to_the_builder(path: Path) -> bool:
    """Whether ``.dockerignore`` lets a file or directory through: the last line that fits decides."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = True
    for line in lines:
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        again, pattern = pattern.startswith("!"), pattern.removeprefix("!")
        parents = [path, *path.parents][:-1]
        if any(parent.match(pattern.removeprefix("**/")) for parent in parents):
            sent = again
    return sent
