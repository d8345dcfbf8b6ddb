"""An application in a real server, and callers that ask it one request after another."""

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.servers import START_S, until

ROOT = Path(__file__).resolve().parents[2]
CALLERS = 8
PAUSE_S = 0.02
"""Between two requests of a caller: without it, an application that is let through leaves a node no time to start."""
LISTENS = re.compile(r"(?:running on|Listening at:) (http://127\.0\.0\.1:\d+)")
SERVERS = {
    "uvicorn": ("uvicorn", "--port", "0", "--no-access-log", "tests.client.telling_apps:asgi"),
    "gunicorn": (
        *("gunicorn", "--bind", "127.0.0.1:0", "--threads", str(CALLERS + 1)),
        *("--no-control-socket", "tests.client.telling_apps:wsgi"),
    ),
}
"""One for asyncio, one with threads that block."""


@contextmanager
def running_app(server, node_address, *, timeout_s):
    """The address of an application that asks a node; it ends when it is told to, and has had no error."""
    program, *arguments = SERVERS[server]
    process = subprocess.Popen(
        [Path(sys.executable).with_name(program), *arguments],
        cwd=ROOT,
        env={**os.environ, "RATELIMITD": node_address, "TIMEOUT_S": str(timeout_s)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = ""
    try:
        while (found := LISTENS.search(said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield found[1]
    finally:
        process.terminate()
        said += process.communicate(timeout=START_S)[1]
    assert "Traceback" not in said, said


class Answer(NamedTuple):
    """What a request was answered: the status, what the limiter told, and how long both took."""

    began_s: float
    took_s: float
    status: int
    reason: str
    error: str
    waited_s: float


class Load:
    """Callers of /many, in threads."""

    def __init__(self, url):
        self._client = httpx.Client(base_url=url, timeout=START_S)
        self._stopping = threading.Event()
        self._told = threading.Condition()
        self._answers = []
        self._errors = []
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        self.asked = 0

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop()
        self._client.close()

    def ask(self, path):
        """One request beside the others."""
        return self._client.get(path)

    def wait_for(self, reasons, count=40):
        """Wait until the last so many requests were told nothing else, all of them asked after this was called."""
        first = self.mark()

        def told():
            last = self._answers[-count:]
            return len(last) == count and all(
                answer.reason in reasons and answer.began_s > first for answer in last
            )

        with self._told:
            assert self._told.wait_for(lambda: self._errors or told(), START_S), self._answers[-9:]
        assert not self._errors, self._errors

    def wait_until_limited(self, path):
        """Ask until it is denied."""
        until(lambda: self.ask(path).status_code == 429, f"{path} is limited")

    def mark(self):
        """This moment, for ``since``."""
        return time.perf_counter()

    def since(self, mark):
        """The answers to what was asked after that."""
        with self._told:
            return [answer for answer in self._answers if answer.began_s > mark]

    def stop(self):
        """Let all requests end; returns every answer."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        assert not self._errors, self._errors
        return self._answers

    def _call(self):
        try:
            while not self._stopping.wait(PAUSE_S):
                self._ask()
        except httpx.HTTPError as error:  # a request that was lost
            with self._told:
                self._errors.append(error)
                self._told.notify_all()

    def _ask(self):
        with self._told:
            self.asked += 1
        began_s = self.mark()
        response = self._client.get("/many")
        took_s = self.mark() - began_s
        answer = Answer(began_s, took_s, response.status_code, **response.json())
        with self._told:
            self._answers.append(answer)
            self._told.notify_all()
