"""The plan of a local cluster."""

import socket
from pathlib import Path

import pytest

from ratelimitd.cli.client_options import UsageError
from ratelimitd.cli.dev import run
from ratelimitd.cli.dev.command import RULES, suggestions
from ratelimitd.cli.dev.run import LAST_PORT, NodePlan, is_free, nodes
from ratelimitd.rules.rules_file import parse_rules
from ratelimitd.settings.table import Settings


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The ports that other processes listen on."""
    taken = set()
    monkeypatch.setattr(run, "is_free", lambda port: port not in taken)
    return taken


def test_nodes_are_on_successive_ports():
    planned = nodes(3, grpc_port=9090, http_port=8080)
    assert planned == [
        NodePlan("n1", 9090, 8080), NodePlan("n2", 9091, 8081), NodePlan("n3", 9092, 8082),
    ]  # fmt: skip
    assert planned[1].grpc_address == "127.0.0.1:9091"
    assert planned[1].http_address == "127.0.0.1:8081"


def test_taken_ports_are_skipped(taken):
    taken |= {9090, 8081}
    planned = nodes(2, grpc_port=9090, http_port=8080)
    assert planned == [NodePlan("n1", 9091, 8080), NodePlan("n2", 9092, 8082)]


def test_no_port_is_used_twice():
    planned = nodes(2, grpc_port=8080, http_port=8080)
    assert planned == [NodePlan("n1", 8080, 8082), NodePlan("n2", 8081, 8083)]


def test_too_few_ports_are_a_clear_error():
    with pytest.raises(UsageError, match="no 2 free ports from 65535 on"):
        nodes(2, grpc_port=LAST_PORT, http_port=8080)


def test_command_line_of_a_node_has_valid_settings():
    command = NodePlan("n1", 9090, 8080).command(
        Path("/d"),
        redis_url="unix:///d/s",
        database_url="sqlite:////d/r.db",
        rules_file=Path("/d/rules.yaml"),
        identifier_types="tenant,model",
    )
    flags = command[command.index("serve") + 1 :]
    names = [flag.removeprefix("--").replace("-", "_").upper() for flag in flags[::2]]
    settings = Settings.load({}, dict(zip(names, flags[1::2], strict=True)))
    assert str(settings.listen) == "127.0.0.1:9090"
    assert str(settings.http_listen) == "127.0.0.1:8080"
    assert settings.node_id == "n1"
    assert settings.redis_url == "unix:///d/s"
    assert settings.database_url == "sqlite:////d/r.db"
    assert settings.rules_file == Path("/d/rules.yaml")
    assert settings.identifier_types == ("tenant", "model")
    assert settings.state_dir == Path("/d/n1-state")


def test_default_rules_are_valid():
    [rule] = parse_rules(RULES.encode())
    assert (rule.endpoint, rule.limit, rule.window_seconds) == ("*", 10, 60)


def test_suggestions_name_the_nodes_and_the_processes():
    planned = nodes(3, grpc_port=9090, http_port=8080)
    lines = list(suggestions(planned, 123, 456))
    assert "--target 127.0.0.1:9090 " in lines[0]
    assert "--target 127.0.0.1:9092 " in lines[1]
    assert any(line.startswith("kill -9 123 ") for line in lines)
    assert any(line.startswith("kill -STOP 456 ") for line in lines)
    assert len({line.index("  # ") for line in lines}) == 1


@pytest.mark.parametrize(
    ("rule", "tried"),
    [
        ("endpoint: '*', identifier_type: ip", "ratelimitd check ip 192.0.2.7 /orders --target"),
        (
            "endpoint: 'GET /a', identifier_type: user",
            "ratelimitd check user alice 'GET /a' --target",
        ),
        ("endpoint: --json, identifier_type: user", None),
        ("endpoint: /a, identifier_type: all", None),
        ("endpoint: /a, identifier_type: ip+user", None),
        ("endpoint: /a, identifier_type: user, enabled: false", None),
    ],
)
def test_suggestion_matches_one_of_other_rules_without_naming_its_limit(rule, tried):
    rules = parse_rules(f"rules: [{{{rule}, limit: 3, window: 1d}}]".encode())
    planned = nodes(2, grpc_port=9090, http_port=8080)
    listing, *lines = suggestions(planned, 123, 456, rules)
    assert listing.startswith("ratelimitd rules list --target 127.0.0.1:9090 ")
    checks = [line for line in lines if line.startswith("ratelimitd check")]
    addresses = ["127.0.0.1:9090", "127.0.0.1:9091"] if tried else []
    assert [one.partition("  #")[0].rstrip() for one in checks] == [
        f"{tried} {address}" for address in addresses
    ]
    assert " of 10" not in "".join(lines)


def test_port_is_taken_while_another_process_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
