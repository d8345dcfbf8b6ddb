"""The programs of examples/languages, as ``tools/languages.sh`` built them: each answers a line by a line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BUILT = Path(sys.prefix) / "languages"

_PROGRAMS = {
    "go": ("", _BUILT / "go" / "first-check"),
    "java": ("java -jar", _BUILT / "java" / "target" / "first-check.jar"),
    "node": ("node", _BUILT / "node" / "first_check.js"),
    "rust": ("", _BUILT / "cargo" / "debug" / "first-check"),
}

LANGUAGES = sorted(_PROGRAMS)

_UNCHECKED = re.compile(r"200 OK \(nobody could be asked: NO_ANSWER (\w+)\)")


class Program:
    """One running program."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, address: str | bytes) -> str:
        """What a web application would answer the caller with this address."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = address.encode() if isinstance(address, str) else address
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().decode()
        assert answer, "the program has ended"
        return answer.removesuffix("\n")


@contextmanager
def asking(language: str, address: str, *more: str) -> Iterator[Program]:
    """The program of a language, asking the node at ``address``; ``more`` is a deadline in ms in place of its own."""
    runtime, path = _PROGRAMS[language]
    assert path.exists(), f"{path} is missing: `make test-system` builds it, by tools/languages.sh"
    command = [*runtime.split(), str(path), address, *more]
    if runtime:
        assert shutil.which(command[0]), f"{command[0]} is not on PATH"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield Program(process)
        finally:
            process.kill()


def status_without_answer(answer: str) -> str | None:
    """The gRPC status for which a caller was let through, in small letters only; ``None`` if the node was asked."""
    told = _UNCHECKED.fullmatch(answer)
    return told[1].replace("_", "").lower() if told else None
