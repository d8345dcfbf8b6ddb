"""Callers that are not grpcio, behind one interface: grpc-go, through our small program, and ``buf curl``."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2  # so that details can be decoded
from grpc_health.v1 import health_pb2

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.system.process import START_S
from tests.system.programs import program

PACKAGE = "ratelimiter.v1."
PROTO = Path(__file__).parents[2] / "proto"

_DETAILS = {
    message.DESCRIPTOR.full_name: message
    for message in (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.ResourceInfo,
    )
}


@dataclass(frozen=True)
class Question:
    """A call: ``method`` is its full name with package, ``bare`` asks for it under the path without."""

    method: str
    request: Mapping[str, Any] = field(default_factory=dict)
    bare: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """As it goes over the wire."""
        service, _, name = self.method.rpartition(".")
        return f"/{service.removeprefix(PACKAGE) if self.bare else service}/{name}"

    def answer(self, told: Mapping[str, Any]) -> Message:
        """An answer that a client told as JSON."""
        method = descriptor_pool.Default().FindMethodByName(self.method)
        message: Message = GetMessageClass(method.output_type)()
        return json_format.ParseDict(dict(told), message)


class Ended(NamedTuple):
    """How a call ended: ``code`` in small letters only, such as ``invalidargument``."""

    code: str
    text: str
    details: list[Message]
    answers: list[Message]


class GrpcGo:
    """One connection of grpc-go."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._asked: deque[Question] = deque()
        self.connections = 0
        """Connections that it opened so far."""

    def ask(self, question: Question, **options: Any) -> Ended:
        """``options`` are further members of ``question`` in the program."""
        self.begin(question, **options)
        return self.ended()

    def begin(self, question: Question, **options: Any) -> None:
        """Make a call whose end :meth:`ended` waits for."""
        line = {
            "path": question.path,
            "method": question.method,
            "request": question.request,
            "metadata": question.metadata,
            **options,
        }
        assert self._process.stdin is not None
        self._asked.append(question)
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def ended(self) -> Ended:
        """The end of the oldest call that was begun."""
        assert self._process.stdout is not None
        line = json.loads(self._process.stdout.readline())
        self.connections = line["connections"]
        details = [_unpacked(json_format.ParseDict(one, AnyMessage())) for one in line["details"]]
        answers = [*map(self._asked.popleft().answer, line["answers"])]
        return Ended(line["code"].lower(), line["message"], details, answers)


@contextmanager
def grpc_go(address: str, directory: Path, ca: Path | None = None) -> Iterator[GrpcGo]:
    """A connection of grpc-go to a node, over TLS if ``ca`` is to verify it."""
    descriptors = directory / "descriptors.binpb"
    descriptors.write_bytes(_descriptors().SerializeToString())
    command = [program("client"), "-target", address, "-descriptors", str(descriptors)]
    command += ["-ca", str(ca)] if ca else []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield GrpcGo(process)
        finally:
            process.kill()


class BufCurl:
    """``buf curl``, over HTTP/2 from the first octet on, or over TLS if ``ca`` is to verify the node.

    What the messages are it learns by reflection; for paths without package, which no reflection tells of, it reads
    our contract with the package taken out.
    """

    def __init__(self, address: str, directory: Path, ca: Path | None = None) -> None:
        self._url = f"https://localhost:{address.rpartition(':')[2]}" if ca else f"http://{address}"
        self._arguments = ["--cacert", str(ca)] if ca else ["--http2-prior-knowledge"]
        self._bare = directory / "bare"
        self._bare.mkdir()
        text = (PROTO / "ratelimiter/v1/ratelimiter.proto").read_text()
        text = text.replace(f"package {PACKAGE[:-1]};", "")
        (self._bare / "ratelimiter.proto").write_text(text)

    def ask(self, question: Question) -> Ended:
        """Make a call in a process of its own."""
        arguments = ["--data", json.dumps(question.request)]
        arguments += ["--schema", str(self._bare)] if question.bare else []
        for key, value in question.metadata.items():
            arguments += ["--header", f"{key}: {value}"]
        status, out, error = self.run(*arguments, question.path)
        if status == 0:
            return Ended("ok", "", [], [question.answer(json.loads(out))])
        told = json.loads(error)
        details = [
            _unpacked(
                AnyMessage(type_url=f"/{one['type']}", value=base64.b64decode(one["value"] + "=="))
            )
            for one in told.get("details", ())
        ]
        return Ended(told["code"].replace("_", ""), told.get("message", ""), details, [])

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Status, stdout and stderr of the command; the last argument is the path of a URL."""
        *options, path = arguments
        command = [str(Path(sys.executable).with_name("buf")), "curl", "--protocol", "grpc"]
        done = subprocess.run(
            [*command, *self._arguments, *options, self._url + path],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


def _unpacked(detail: AnyMessage) -> Message:
    return _DETAILS[detail.TypeName()].FromString(detail.value)


def _descriptors() -> descriptor_pb2.FileDescriptorSet:
    """Our contract and the health protocol, each behind what it imports."""
    found = descriptor_pb2.FileDescriptorSet()
    files: tuple[Any, ...] = (*pb.DESCRIPTOR.dependencies, pb.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for file in files:
        file.CopyToProto(found.file.add())
    return found
