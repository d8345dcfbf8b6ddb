import pytest

from ratelimitd.rules.rules_file import parse_rules

CONFIG = """\
domain: messaging
descriptors:
- key: to_number
  rate_limit: {unit: day, requests_per_unit: 100}
- key: spam
  value: "yes"
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def test_rules_are_printed_and_notes_go_to_stderr(run, config):
    ended = run("rules", "import-envoy", config, "--identifiers", "ip=ip")
    [rule] = parse_rules(ended.out.encode())
    assert (rule.endpoint, rule.identifier_type, rule.limit) == ("messaging", "api_key", 100)
    assert (ended.status, ended.err.splitlines()) == (
        0,
        [
            "line 5: messaging/spam=yes: has no limit, so it needs no rule",
            "nodes need ENVOY_IDENTIFIERS=ip=ip,to_number=api_key",
            "with types of their own, which IDENTIFIER_TYPES declares: --identifiers ip=ip,to_number=to_number",
            "1 rule, 0 limits left out",
        ],
    )


def test_identifiers_default_to_those_of_a_node(run, config):
    config.write_text(CONFIG.replace("to_number", "remote_address"))
    assert "identifier_type: ip" in run("rules", "import-envoy", config).out
    ended = run("rules", "import-envoy", config, "--identifiers", "")
    assert "identifier_type: api_key" in ended.out
    assert "nodes need ENVOY_IDENTIFIERS=remote_address=api_key\n" in ended.err


def test_key_has_the_given_type(run, config):
    ended = run("rules", "import-envoy", config, "--identifiers", "to_number=tenant")
    assert "identifier_type: tenant" in ended.out
    assert "ENVOY_IDENTIFIERS" not in ended.err


def test_file_uses_the_short_form_and_omissions_are_counted(run, config):
    config.write_text(f"{CONFIG}  rate_limit: {{unit: second, requests_per_unit: 0}}\n")
    ended = run("rules", "import-envoy", config)
    assert ended.out == (
        "rules:\n"
        "- endpoint: messaging\n"
        "  identifier_type: api_key\n"
        "  limit: 100\n"
        "  window: 1d\n"
        "  algorithm: fixed_window\n"
    )
    assert ended.err.endswith("\n1 rule, 1 limit left out\n")


def test_invalid_file_is_refused(run, config):
    config.write_text("rules: []")
    ended = run("rules", "import-envoy", config)
    assert (ended.status, ended.out) == (1, "")
    assert "must be a mapping with a domain" in ended.err


def test_missing_file_and_invalid_identifiers_are_usage_errors(run, config):
    missing = run("rules", "import-envoy", config.with_name("none.yaml"))
    assert (missing.status, "No such file" in missing.err) == (2, True)
    wrong = run("rules", "import-envoy", config, "--identifiers", "ip")
    assert (wrong.status, "--identifiers must be KEY=TYPE" in wrong.err) == (2, True)
