"""The blocking clients are generated from the asyncio ones, and an edit of a generated file is found."""

from tools import generated_code
from tools.generated_code import TARGET, differences, sync_twins, synchronous

ASYNC = '''# Source of client.py: run `make proto` after a change.
"""Closed with ``async with``; errors are ``grpc.aio.AioRpcError``."""
import grpc.aio
from ratelimitd_client.async_node_client import AsyncNodeClient


class AsyncClient:
    async def __aenter__(self):
        return self

    async def rules(self) -> AsyncIterator[str]:
        async with self.opened() as page:
            for rule in page.rules:
                yield rule
        return [await self.call(rule) async for rule in self.rules()]
'''

BLOCKING = '''# Generated from async_client.py by `make proto` (tools/generated_code.py). Do not edit.
"""Closed with ``with``; errors are ``grpc.RpcError``."""
import grpc
from ratelimitd_client.node_client import NodeClient


class Client:
    def __enter__(self):
        return self

    def rules(self) -> Iterator[str]:
        with self.opened() as page:
            yield from page.rules
        return [self.call(rule) for rule in self.rules()]
'''


def test_keywords_and_names_of_asyncio_are_replaced():
    assert synchronous(ASYNC, "ratelimitd_client/async_client.py") == BLOCKING


def test_the_committed_blocking_clients_are_as_generated():
    twins = sync_twins()
    assert len(twins) == 3
    assert differences({name: (TARGET / name).read_text() for name in twins}, twins) == []


def test_an_edited_file_is_shown_with_its_difference():
    found = differences({"a.py": "one\ntwo\n"}, {"a.py": "one\n"})
    assert "-two" in found
    assert "make proto" in found[-1]


def test_the_check_fails_for_an_edited_file_and_succeeds_again_after_writing(
    tmp_path, monkeypatch, capsys
):
    package = tmp_path / "ratelimitd_client"
    package.mkdir()
    for name in generated_code.SYNC_TWINS:
        (tmp_path / name).write_text((TARGET / name).read_text())
    monkeypatch.setattr(generated_code, "TARGET", tmp_path)
    monkeypatch.setattr(generated_code, "generate", lambda _directory: None)
    monkeypatch.setattr(generated_code, "outdated_bounds", lambda _code: [])
    monkeypatch.setattr(generated_code, "DOCUMENT", tmp_path / "openapi.json")
    monkeypatch.setattr(generated_code, "DESCRIPTORS", tmp_path / "descriptors.binpb")
    assert run(monkeypatch, "--write") == 0
    assert run(monkeypatch, "--check") == 0
    with (package / "client.py").open("a") as file:
        file.write("EDITED = True\n")
    assert run(monkeypatch, "--check") == 1
    assert "-EDITED = True" in capsys.readouterr().out
    assert run(monkeypatch, "--write") == 0
    assert run(monkeypatch, "--check") == 0


def run(monkeypatch, mode):
    monkeypatch.setattr("sys.argv", ["generated_code.py", mode])
    return generated_code.main()
