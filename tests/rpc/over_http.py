"""Hand-made calls over the HTTP port of a node, in each of its protocols, and their ends."""

import base64
import enum
import json
from typing import NamedTuple
from urllib.parse import unquote

import httpx
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import status_pb2

from ratelimitd.rpc.interface import StatusCode

MESSAGE, TRAILERS = 0, 0x80


class Protocol(enum.StrEnum):
    """The content type of a call."""

    JSON = "application/json"
    PROTO = "application/proto"
    GRPC_WEB = "application/grpc-web+proto"


class Ended(NamedTuple):
    """The end of a call: its status, and the answer or the details of the error."""

    code: StatusCode
    text: str = ""
    answer: Message | None = None
    details: tuple[tuple[str, bytes], ...] = ()


def framed(flag, content):
    return bytes((flag,)) + len(content).to_bytes(4, "big") + content


def frames(body):
    """The flag and the content of each frame of a body."""
    while body:
        size = int.from_bytes(body[1:5], "big")
        yield body[0], body[5 : 5 + size]
        body = body[5 + size :]


def as_json(message, *, camel=False):
    return json_format.MessageToJson(message, preserving_proto_field_name=not camel).encode()


def request_body(message, protocol, *, camel=False):
    match protocol:
        case Protocol.JSON:
            return as_json(message, camel=camel)
        case Protocol.PROTO:
            return message.SerializeToString()
        case Protocol.GRPC_WEB:
            return framed(MESSAGE, message.SerializeToString())


async def called(client: httpx.AsyncClient, path, body, protocol, *, answer_class, **headers):
    """Make a call in a protocol and read its end."""
    headers = {"content-type": protocol, **headers}
    response = await client.post(path, content=body, headers=headers)
    if protocol is Protocol.GRPC_WEB:
        return _end_of_grpc_web(response, answer_class)
    if response.status_code != 200:
        return _end_of_connect(response)
    assert response.headers["content-type"] == protocol
    answer = answer_class()
    if protocol is Protocol.JSON:
        json_format.Parse(response.content, answer)
        # Every field is present under the name of the contract, even at its default.
        expected = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        assert response.json() == expected
    else:
        answer.ParseFromString(response.content)
    return Ended(StatusCode.OK, answer=answer)


def _end_of_connect(response):
    content = json.loads(response.content)
    name = content["code"].upper()
    details = (
        (detail["type"], base64.b64decode(detail["value"] + "=="))
        for detail in content.get("details", ())
    )
    code = StatusCode["CANCELLED" if name == "CANCELED" else name]
    return Ended(code, content["message"], details=tuple(details))


def _end_of_grpc_web(response, answer_class):
    assert response.status_code == 200
    *messages, (flag, block) = frames(response.content)
    assert flag == TRAILERS
    trailers = dict(line.split(": ", 1) for line in block.decode().split("\r\n") if line)
    code = StatusCode(int(trailers["grpc-status"]))
    if code is StatusCode.OK:
        [(flag, message)] = messages
        assert flag == MESSAGE
        return Ended(code, answer=answer_class.FromString(message))
    assert not messages
    packed = base64.b64decode(trailers.get("grpc-status-details-bin", "") + "==")
    return Ended(code, unquote(trailers.get("grpc-message", "")), details=details_of(packed))


def details_of(packed):
    """The details of a serialised ``google.rpc.Status``."""
    status = status_pb2.Status.FromString(packed)
    return tuple((detail.TypeName(), detail.value) for detail in status.details)
