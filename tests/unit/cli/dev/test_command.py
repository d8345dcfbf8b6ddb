"""`dev cluster`: from options to a plan and its run."""

import pytest

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.dev import command, servers
from ratelimitd.cli.dev import run as run_module

RULES = "rules: [{endpoint: /a, identifier_type: tenant, limit: 1, window: 1m}]"


@pytest.fixture
def runs(monkeypatch):
    """Replace the run; collects the plans."""
    runs = []

    class Recorded:
        def __init__(self, nodes, _output, **options):
            runs.append((nodes, options))

        async def run(self):
            pass

    monkeypatch.setattr(command, "Cluster", Recorded)
    monkeypatch.setattr(run_module, "is_free", lambda _port: True)
    return runs


def test_group_help_lists_its_commands(run):
    ended = run("dev", "--help")
    assert ended.status == 0
    assert "cluster  " in ended.out


def test_default_is_three_nodes_on_the_usual_ports(run, runs):
    assert run("dev", "cluster") == (0, "", "")
    [(nodes, options)] = runs
    addresses = [(node.grpc_address, node.http_address) for node in nodes]
    assert addresses == [(f"127.0.0.1:{9090 + n}", f"127.0.0.1:{8080 + n}") for n in range(3)]
    unset = {"rules_file": None, "rules": None}
    assert options == {**unset, "sqlite": False, "identifier_types": ""}


def test_everything_can_be_chosen(run, runs, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    ended = run(
        "dev", "cluster", "--nodes", 2, "--grpc-port", 7000, "--http-port", 7100,
        "--rules-file", rules, "--sqlite", "--identifier-types", "tenant",
    )  # fmt: skip
    assert ended.status == 0
    [(nodes, options)] = runs
    assert [node.grpc_port for node in nodes] == [7000, 7001]
    assert [node.http_port for node in nodes] == [7100, 7101]
    [rule] = options.pop("rules")
    assert (rule.endpoint, rule.identifier_type) == ("/a", "tenant")
    assert options == {"rules_file": rules, "sqlite": True, "identifier_types": "tenant"}


def test_invalid_rule_is_reported_before_anything_starts(run, runs, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    ended = run("dev", "cluster", "--sqlite", "--rules-file", rules)
    assert ended.status == 1
    assert "rules[0].identifier_type: must be one of user, ip, api_key, " in ended.err
    assert run("dev", "cluster", "--sqlite", "--rules-file", rules, "--identifier-types", "A").err
    assert not runs


@pytest.mark.parametrize(
    "wrong", [("--nodes", 0), ("--grpc-port", 0), ("--http-port", 65_536), ("--rules-file", "/no")]
)
def test_invalid_option_is_a_usage_error(run, runs, wrong):
    assert run("dev", "cluster", *wrong).status == 2
    assert not runs


def test_missing_wheels_are_one_line_on_stderr(run, runs, monkeypatch):
    def require(*, postgresql):
        message = f"not there ({postgresql})"
        raise CliError(message)

    monkeypatch.setattr(servers, "require", require)
    assert run("dev", "cluster") == (1, "", "Error: not there (True)\n")
    assert run("dev", "cluster", "--sqlite").err == "Error: not there (False)\n"
    assert not runs
