import dataclasses
import os
import socket
from pathlib import Path

import pytest

from ratelimitd.errors import SettingsError
from ratelimitd.settings.parsing import MASK, Address
from ratelimitd.settings.table import SETTINGS, Settings

SPECIFIED_DEFAULTS = {
    "LISTEN": "127.0.0.1:9090",
    "HTTP_LISTEN": "127.0.0.1:8080",
    "DATABASE_URL": "sqlite:///ratelimitd.db",
    "STATE_DIR": "./ratelimitd-state",
    "CONSISTENCY": "eventual",
    "TIMESTAMPS": "bounded",
    "ON_BREAKER_OPEN": "fail_open",
    "WORKERS": "1",
    "SYNC_INTERVAL_MS": "100",
    "CACHE_ENTRIES": "1000000",
    "CACHE_TTL_S": "300",
    "BREAKER_FAILURES": "5",
    "BREAKER_RECOVERY_S": "30",
    "DRAIN_S": "10",
    "LOG_LEVEL": "info",
    "LOG_FORMAT": "auto",
    "REFLECTION": "on",
}

CREDENTIALS = ("ADMIN_TOKEN", "CHECK_TOKEN", "KEY_SECRET")
ACCESS = ("ADMIN_SANS", "CHECK_SANS", "TOKENS_FILE", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")
NEVER_EMPTY = (*CREDENTIALS, *ACCESS)


def load(**environ):
    return Settings.load({f"RATELIMITD_{name}": text for name, text in environ.items()}, {})


def problem(environ=None, flags=None):
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ or {}, flags or {})
    return str(caught.value)


@pytest.mark.parametrize(("name", "default"), SPECIFIED_DEFAULTS.items())
def test_defaults_match_the_documentation(name, default):
    assert {spec.name: spec.default for spec in SETTINGS}[name] == default


def test_every_default_is_valid_text_of_its_own_setting():
    given = {spec.name: spec.default for spec in SETTINGS if spec.name not in NEVER_EMPTY}
    assert load(**given) == Settings.load({}, {})


@pytest.mark.parametrize("name", CREDENTIALS)
def test_an_empty_credential_is_refused(name, tmp_path):
    blank = tmp_path / "blank"
    blank.write_text("\n")
    assert problem({f"RATELIMITD_{name}": ""}).startswith(f"RATELIMITD_{name} is empty: ")
    assert problem({f"RATELIMITD_{name}_FILE": str(blank)}) == (
        f"RATELIMITD_{name}_FILE: {blank} is empty"
    )
    flag = "--" + name.lower().replace("_", "-")
    assert problem(flags={name: ""}).startswith(f"{flag} is empty: ")
    assert problem(flags={f"{name}_FILE": ""}).startswith(f"{flag}-file is empty: ")


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("name", NEVER_EMPTY)
def test_an_empty_value_does_not_open_the_node(name, text):
    assert problem({f"RATELIMITD_{name}": text}) == (
        f"RATELIMITD_{name} is empty: give it a value, or leave it out"
    )


def test_every_field_is_a_setting_and_every_setting_a_field():
    fields = {field.name.upper() for field in dataclasses.fields(Settings)}
    assert fields - {"SOURCES", "GUARD_CHECKS"} == {spec.name for spec in SETTINGS}


def test_settings_cannot_be_changed_after_loading():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().workers = 2


def test_a_flag_overrides_the_environment():
    settings = Settings.load(
        {"RATELIMITD_LISTEN": "0.0.0.0:1"}, {"LISTEN": "[::1]:2", "DRAIN_S": None}
    )
    assert settings.listen == Address("::1", 2)
    assert settings.sources == {"LISTEN": "flag"}


def test_all_problems_are_reported_at_once():
    text = problem(
        {"RATELIMITD_FOO": "1", "RATELIMITD_DRAIN_S": "-1", "RATELIMITD_TLS_CERT": "cert.pem"},
        {"LISTEN": "9090"},
    )
    assert "RATELIMITD_FOO is not a setting" in text
    assert "RATELIMITD_DRAIN_S must be a whole number from 0 to 3600, not '-1'" in text
    assert "--listen must be HOST:PORT" in text
    assert "TLS_CERT and TLS_KEY are set together" in text
    assert "\n" not in text


def test_a_wrong_setting_causes_no_further_problems():
    text = problem({"RATELIMITD_HTTP_LISTEN": "127.0.0.1:9090"}, {"LISTEN": "9090"})
    assert text.startswith("--listen must be HOST:PORT")
    assert ";" not in text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"CONSISTENCY": "strict", "ON_BREAKER_OPEN": "local", "REDIS_URL": "redis://host"},
            "ON_BREAKER_OPEN: local needs CONSISTENCY=eventual, because",
        ),
        (
            {"CONSISTENCY": "strict", "ON_BREAKER_OPEN": "local", "WORKERS": "2"},
            "ON_BREAKER_OPEN: local needs CONSISTENCY=eventual, because",
        ),
        ({"ENVOY_IDENTIFIERS": "org=tenant"}, "ENVOY_IDENTIFIERS: each TYPE must be user,"),
        (
            {"SPOE_LISTEN": "127.0.0.1:8080", "TRUSTED_PROXIES": "127.0.0.1"},
            "SPOE_LISTEN is the same address as LISTEN or HTTP_LISTEN",
        ),
        ({"SPOE_LISTEN": "127.0.0.1:9091"}, "SPOE_LISTEN needs TRUSTED_PROXIES: "),
        (
            {"RECORD_DIR": "trace", "RECORD_BYTES": "16000000", "WORKERS": "2"},
            "RECORD_BYTES must be at least 10000000 for each of the WORKERS",
        ),
        ({"AUTH_IDENTIFIERS": "x-t=tenant"}, "AUTH_IDENTIFIERS: each TYPE must be user,"),
        ({"AUTH_IDENTIFIERS": "x-a=api_key,x-b=api_key"}, "each HEADER and each TYPE but ip once"),
        (
            {"AUTH_IDENTIFIERS": ",".join(f"x-{n}=t{n}" for n in range(9))},
            "at most 8 types",
        ),
        ({"AUTH_ENDPOINTS": "HEAD /orders"}, "GET includes HEAD"),
        ({"TLS_KEY": "k"}, "TLS_CERT and TLS_KEY are set together"),
        ({"TLS_CLIENT_CA": "ca"}, "TLS_CLIENT_CA needs TLS_CERT"),
        ({"HTTP_TLS": "on"}, "HTTP_TLS needs TLS_CERT and TLS_KEY"),
        ({"ADMIN_SANS": "ops"}, "need TLS_CLIENT_CA"),
        ({"CHECK_SANS": "app"}, "need TLS_CLIENT_CA"),
        ({"ADMIN_TOKEN": "same", "CHECK_TOKEN": "same"}, "ADMIN_TOKEN and CHECK_TOKEN are equal"),
        ({"TOKENS_FILE": "f", "LOOPBACK_ADMIN": "on"}, "LOOPBACK_ADMIN and TOKENS_FILE exclude"),
        ({"USER_HEADER": "X-U", "TOKENS_FILE": "f"}, "USER_HEADER needs TRUSTED_PROXIES"),
        ({"USER_HEADER": "X-U", "TRUSTED_PROXIES": "::1"}, "USER_HEADER needs TRUSTED_PROXIES"),
        (
            {"USER_HEADER": "X-U", "TOKENS_FILE": "f", "TRUSTED_PROXIES": "unix,::/0"},
            "USER_HEADER and a network of all addresses",
        ),
        (
            {
                "TLS_CERT": "c",
                "TLS_KEY": "k",
                "TLS_CLIENT_CA": "a",
                "ADMIN_SANS": "x",
                "CHECK_SANS": "y,x",
            },
            "share a name",
        ),
        ({"LISTEN": "127.0.0.1:7000", "HTTP_LISTEN": "127.0.0.1:7000"}, "are the same address"),
        ({"ON_BREAKER_OPEN": "shut"}, "must be fail_open, local or deny"),
        ({"TRANSPORT": "http"}, "RATELIMITD_TRANSPORT must be native or grpcio"),
    ],
)
def test_forbidden_combinations_and_values_are_refused(environ, expected):
    assert expected in problem({f"RATELIMITD_{name}": text for name, text in environ.items()})


@pytest.mark.parametrize(
    "given",
    [
        {"CONSISTENCY": "eventual", "ON_BREAKER_OPEN": "local"},
        {"CONSISTENCY": "strict", "ON_BREAKER_OPEN": "local"},
        {"CONSISTENCY": "eventual", "ON_BREAKER_OPEN": "local", "REDIS_URL": "redis://host"},
        {"CONSISTENCY": "strict", "ON_BREAKER_OPEN": "deny", "REDIS_URL": "redis://host"},
        {"USER_HEADER": "X-U", "TOKENS_FILE": "f", "TRUSTED_PROXIES": "::1"},
        {"SPOE_LISTEN": "127.0.0.1:9000", "TRUSTED_PROXIES": "127.0.0.1"},
        {"SPOE_LISTEN": "127.0.0.1:0", "LISTEN": "127.0.0.1:0", "TRUSTED_PROXIES": "127.0.0.1"},
    ],
)
def test_other_combinations_are_valid(given):
    assert load(**given).sources.keys() == given.keys()


@pytest.mark.parametrize("url", ["", "redis://host"])
def test_several_processes_may_share_one_port(url):
    assert load(WORKERS="2", REDIS_URL=url).workers == 2


def test_a_private_store_is_the_shared_state_of_workers_and_its_password_is_not_shown():
    settings = load(WORKERS="2").with_private_store("unix://ratelimitd:hush@/state/valkey.sock")
    [row] = [row for row in settings.describe() if row.name == "REDIS_URL"]
    assert row.source == "state directory"
    assert row.value.endswith("@/state/valkey.sock")
    assert "hush" not in str(settings.describe()) + repr(settings)


def test_port_0_may_be_used_twice():
    settings = load(LISTEN="127.0.0.1:0", HTTP_LISTEN="127.0.0.1:0")
    assert settings.listen == settings.http_listen


def test_certificate_names_that_are_addresses_may_be_in_any_notation():
    names = {"ADMIN_SANS": "2001:DB8:0::0:1,ops", "CHECK_SANS": "spiffe://a:b, 10.0.0.1"}
    settings = load(TLS_CERT="c", TLS_KEY="k", TLS_CLIENT_CA="a", **names)
    assert settings.admin_sans == ("2001:db8::1", "ops")
    assert settings.check_sans == ("spiffe://a:b", "10.0.0.1")


def test_an_invalid_setting_is_not_checked_in_combinations():
    text = problem(
        {
            "RATELIMITD_CONSISTENCY": "strict",
            "RATELIMITD_ON_BREAKER_OPEN": "local",
            "RATELIMITD_REDIS_URL": "http://host",
        }
    )
    assert "REDIS_URL must" in text
    assert "ON_BREAKER_OPEN" not in text


@pytest.mark.parametrize("name", [spec.name for spec in SETTINGS if spec.secret])
def test_no_secret_is_shown_in_an_error(name):
    assert "hush hush" not in problem({f"RATELIMITD_{name}": "hush hush\0", "RATELIMITD_FOO": ""})


@pytest.mark.parametrize("name", ["OTEL_ENDPOINT", "TRUSTED_PROXIES", "LISTEN"])
@pytest.mark.parametrize("text", ["http://me:hush@host:4318", "http://host:4318/?token=hush"])
def test_no_password_of_a_url_is_quoted_in_an_error(name, text):
    told = problem({f"RATELIMITD_{name}": text})
    assert told.startswith(f"RATELIMITD_{name} must be ")
    assert "hush" not in told


def test_secrets_are_masked_wherever_settings_are_shown():
    settings = load(
        ADMIN_TOKEN="topsecret",
        KEY_SECRET="topsecret-topsecret",
        DATABASE_URL="sqlite:///a?password=topsecret",
    )
    shown = repr(settings) + str(settings.describe())
    assert "topsecret" not in shown
    assert f"ADMIN_TOKEN={MASK!r}" in repr(settings)


def test_describe_has_the_source_of_every_setting(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("from-file\n")
    settings = Settings.load(
        {"RATELIMITD_CHECK_TOKEN_FILE": str(secret), "RATELIMITD_REFLECTION": "off"},
        {"LISTEN": "127.0.0.1:0"},
    )
    assert settings.check_token == "from-file"
    rows = {row.name: row for row in settings.describe()}
    assert list(rows) == [spec.name for spec in SETTINGS]
    assert rows["CHECK_TOKEN"][1:] == (MASK, "file")
    assert rows["REFLECTION"][1:] == ("off", "environment")
    assert rows["LISTEN"][1:] == ("127.0.0.1:0", "flag")
    assert rows["DRAIN_S"][1:] == ("10", "default")
    assert rows["ADMIN_TOKEN"][1:] == ("", "default")


def test_a_node_without_a_name_is_named_by_host_and_process():
    assert load().node_name == f"{socket.gethostname()}:{os.getpid()}"
    assert load(NODE_ID="n1").node_name == "n1"


@pytest.mark.parametrize("name", ["RATELIMITD_CHECK_TOKE", "RATELIMITD_", "RATELIMITD_LISTEN_FILE"])
def test_a_misspelt_variable_stops_the_start(name):
    assert f"{name} is not a setting" in problem({name: "x"})


def test_pages_are_served_for_the_listen_name_and_the_configured_ones():
    assert load().http_names == {"127.0.0.1"}
    assert load(HTTP_LISTEN="node:80", HTTP_HOSTS="a,b").http_names == {"node", "a", "b"}
    assert load(HTTP_LISTEN="").http_names == set()


def test_the_http_socket_of_a_worker_is_in_its_state_directory():
    assert load(STATE_DIR="/state").http_socket == Path("/state/http.sock")


@pytest.mark.parametrize(
    ("flags", "own", "name"),
    [
        ({}, True, "in STATE_DIR/admin-token"),
        ({"CHECK_TOKEN": "t"}, True, "in STATE_DIR/admin-token"),
        ({"ADMIN_TOKEN": "t"}, False, "ADMIN_TOKEN"),
        ({"LOOPBACK_ADMIN": "on"}, False, "ADMIN_TOKEN"),
        (
            {"ADMIN_SANS": "n", "TLS_CLIENT_CA": "a", "TLS_CERT": "b", "TLS_KEY": "c"},
            False,
            "ADMIN_TOKEN",
        ),
    ],
)
def test_a_node_generates_its_admin_token_if_no_setting_grants_the_role(flags, own, name):
    settings = Settings.load({}, flags)
    assert settings.has_own_admin_token is own
    assert settings.admin_token_name == name


def test_workers_get_the_token_of_their_parent():
    worker = Settings.load({}, {}).with_own_admin_token("made")
    assert (worker.admin_token, worker.has_own_admin_token) == ("made", False)
    assert worker.admin_token_name == "in STATE_DIR/admin-token"
    assert "made" not in repr(worker)


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ({}, None),
        ({"LOOPBACK_ADMIN": "on"}, "every caller from loopback may change the rules"),
        ({"LOOPBACK_ADMIN": "on", "ADMIN_TOKEN": "t"}, "has no effect"),
        (
            {
                "LOOPBACK_ADMIN": "on",
                "ADMIN_SANS": "ops",
                "TLS_CERT": "c",
                "TLS_KEY": "k",
                "TLS_CLIENT_CA": "a",
            },
            "has no effect",
        ),
    ],
)
def test_loopback_as_a_credential_has_a_warning(flags, warning):
    lines = Settings.load({}, flags).warnings
    assert len(lines) == (warning is not None)
    assert all(warning in line for line in lines)


def test_identifier_types_add_to_those_of_the_contract():
    settings = Settings.load(
        {"RATELIMITD_IDENTIFIER_TYPES": "tenant,model"}, {"ENVOY_IDENTIFIERS": "org=tenant"}
    )
    assert settings.known_types == ("user", "ip", "api_key", "tenant", "model")
