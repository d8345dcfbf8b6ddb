import pytest

from ratelimitd.errors import SettingsError
from ratelimitd.settings import sources
from ratelimitd.settings.sources import MAX_SECRET_FILE_BYTES, Found, find, unknown_names


def secret_file(tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content)
    return str(path)


def test_an_absent_setting_is_not_found():
    assert find("LISTEN", {}, {"LISTEN": None}, with_file=False) is None


def test_an_empty_text_is_a_value():
    found = find("HTTP_LISTEN", {"RATELIMITD_HTTP_LISTEN": ""}, {}, with_file=False)
    assert found == Found("RATELIMITD_HTTP_LISTEN", "", "environment")


@pytest.mark.parametrize("content", [b"s3cret", b"s3cret\n", b"s3cret\r\n"])
def test_a_file_contains_the_secret_and_an_optional_newline(tmp_path, content):
    path = secret_file(tmp_path, content)
    found = find("ADMIN_TOKEN", {"RATELIMITD_ADMIN_TOKEN_FILE": path}, {}, with_file=True)
    assert found == Found("RATELIMITD_ADMIN_TOKEN_FILE", "s3cret", "file")


def test_a_file_named_by_a_flag_overrides_the_environment(tmp_path):
    path = secret_file(tmp_path, b"from-file")
    found = find(
        "ADMIN_TOKEN", {"RATELIMITD_ADMIN_TOKEN": "x"}, {"ADMIN_TOKEN_FILE": path}, with_file=True
    )
    assert found == Found("--admin-token-file", "from-file", "file")


def test_a_value_and_its_file_together_are_refused(tmp_path):
    path = secret_file(tmp_path, b"x")
    environ = {"RATELIMITD_ADMIN_TOKEN": "x", "RATELIMITD_ADMIN_TOKEN_FILE": path}
    with pytest.raises(
        SettingsError, match="RATELIMITD_ADMIN_TOKEN and RATELIMITD_ADMIN_TOKEN_FILE are both set"
    ):
        find("ADMIN_TOKEN", environ, {}, with_file=True)


def test_only_secrets_can_come_from_a_file(tmp_path):
    path = secret_file(tmp_path, b"x")
    assert find("LISTEN", {"RATELIMITD_LISTEN_FILE": path}, {}, with_file=False) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"\xff", "not a UTF-8 text file"),
        (b"", "is empty"),
        (b" \r\n\n", "is empty"),
        (b"x" * (MAX_SECRET_FILE_BYTES + 1), f"longer than {MAX_SECRET_FILE_BYTES} bytes"),
    ],
)
def test_an_unusable_secret_file_is_reported_with_the_reason(tmp_path, content, reason):
    path = str(tmp_path / "absent") if content is None else secret_file(tmp_path, content)
    with pytest.raises(SettingsError, match=reason) as caught:
        find("KEY_SECRET", {"RATELIMITD_KEY_SECRET_FILE": path}, {}, with_file=True)
    assert str(caught.value).startswith("RATELIMITD_KEY_SECRET_FILE: ")


def test_an_empty_file_name_is_refused():
    with pytest.raises(SettingsError, match="RATELIMITD_ADMIN_TOKEN_FILE is empty: name a file"):
        find("ADMIN_TOKEN", {"RATELIMITD_ADMIN_TOKEN_FILE": ""}, {}, with_file=True)


def test_the_longest_secret_file_is_read(tmp_path):
    path = secret_file(tmp_path, b"x" * MAX_SECRET_FILE_BYTES)
    found = find("KEY_SECRET", {"RATELIMITD_KEY_SECRET_FILE": path}, {}, with_file=True)
    assert found is not None
    assert len(found.text) == MAX_SECRET_FILE_BYTES


def test_unknown_names_are_reported_with_the_closest_match():
    told = unknown_names(
        {"RATELIMITD_LISEN": "", "PATH": ""}, {"DRAIN": "1"}, {"LISTEN", "DRAIN_S"}
    )
    assert told == [
        "RATELIMITD_LISEN is not a setting (did you mean RATELIMITD_LISTEN?)",
        "--drain is not a setting (did you mean --drain-s?)",
    ]
    assert unknown_names({"RATELIMITD_QQQ": ""}, {}, {"LISTEN"}) == [
        "RATELIMITD_QQQ is not a setting"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_GRPC",
        "PORT",
        "PORT_9090_TCP",
        "PORT_9090_TCP_ADDR",
        "PORT_9090_TCP_PORT",
        "PORT_9090_TCP_PROTO",
        "HEADLESS_SERVICE_HOST",
    ],
)
def test_service_variables_of_kubernetes_are_ignored(name):
    assert unknown_names({sources.ENV_PREFIX + name: "10.0.0.1"}, {}, {"LISTEN"}) == []
