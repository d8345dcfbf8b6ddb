"""Files that settings name: usable, private, not about to expire."""

import errno
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme

from ratelimitd.buckets.state_dir import LOCK_NAME, StateDir
from ratelimitd.cli.doctor import files
from ratelimitd.cli.doctor.files import (
    SOON,
    check_admin_token,
    check_record_dir,
    check_rules_file,
    check_secrets,
    check_state_dir,
    check_store_certificate,
    check_tls,
    check_tokens_file,
)
from ratelimitd.node.admin_token import own_admin_token
from ratelimitd.settings.parsing import Address
from ratelimitd.settings.table import Settings
from tests.certificates import self_signed
from tests.named_tokens import entry, token_of, write

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def settings(**given):
    return Settings.load({}, {name.upper(): str(value) for name, value in given.items()})


def one(findings):
    [finding] = findings
    return finding


def private(path, content=b"x"):
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_generated_token_is_reported_with_its_place(tmp_path):
    given = {"state_dir": tmp_path}
    finding = one(check_admin_token(settings(**given)))
    assert (finding.area, finding.level) == ("ADMIN_TOKEN", "ok")
    assert f"{tmp_path}/admin-token will be made" in finding.what
    token = own_admin_token(tmp_path)
    finding = one(check_admin_token(settings(**given)))
    assert "holds one; elsewhere, give a copy to --token-file" in finding.what
    assert token not in str(finding)


@pytest.mark.parametrize(
    "shared", [{"redis_url": "redis://store"}, {"database_url": "postgresql://db/r"}]
)
def test_nodes_of_a_cluster_should_have_one_token(tmp_path, shared):
    finding = one(check_admin_token(settings(state_dir=tmp_path, **shared)))
    assert (finding.level, "one ADMIN_TOKEN_FILE" in finding.remedy) == ("warning", True)


def test_token_that_a_node_would_refuse_is_a_problem(tmp_path):
    private(tmp_path / "admin-token", b"")
    finding = one(check_admin_token(settings(state_dir=tmp_path)))
    assert (finding.level, "is empty" in finding.what) == ("problem", True)


def test_configured_token_has_no_finding(tmp_path):
    assert not list(check_admin_token(settings(state_dir=tmp_path, admin_token="t")))


def test_tokens_file_that_a_node_would_refuse_is_a_problem(tmp_path):
    path = write(tmp_path / "tokens", entry("alice") | {"sha256": token_of("alice")})
    finding = one(check_tokens_file(settings(tokens_file=path), NOW))
    assert (finding.area, finding.level) == ("TOKENS_FILE", "problem")
    assert "tokens[0].sha256" in finding.what
    assert token_of("alice") not in finding.what
    assert "keeps the tokens" in finding.remedy


def test_expired_tokens_are_named(tmp_path):
    path = write(tmp_path / "tokens", entry("alice"), entry("bob", expires="2001-01-01"))
    path.chmod(0o600)
    expired, fine = check_tokens_file(settings(tokens_file=path), NOW)
    assert (expired.level, expired.what) == ("warning", "expired: bob")
    assert (fine.level, fine.what) == ("ok", "2 tokens")
    assert not list(check_tokens_file(settings(), NOW))


def test_users_of_a_proxy_need_the_header(tmp_path):
    path = write(tmp_path / "tokens", entry("alice"), {"name": "bob", "role": "read"})
    path.chmod(0o600)
    found, _ = check_tokens_file(settings(tokens_file=path), NOW)
    assert (found.level, found.what) == ("warning", "1 users without sha256")
    given = settings(tokens_file=path, user_header="X-User", trusted_proxies="::1")
    assert one(check_tokens_file(given, NOW)).level == "ok"


def test_token_that_is_set_elsewhere_is_a_problem(tmp_path):
    path = write(tmp_path / "tokens", entry("alice", token="t"))
    finding = one(check_tokens_file(settings(tokens_file=path, admin_token="t"), NOW))
    assert (finding.level, "already used: ADMIN_TOKEN" in finding.what) == ("problem", True)


def test_loopback_as_a_credential_is_warned_of():
    finding = one(check_admin_token(settings(loopback_admin="on")))
    assert (finding.area, finding.level) == ("LOOPBACK_ADMIN", "warning")
    assert "behind a proxy" in finding.what
    finding = one(check_admin_token(settings(loopback_admin="on", admin_token="t")))
    assert "has no effect" in finding.what


@pytest.mark.parametrize(
    ("mode", "level", "word"),
    [(0o600, "ok", "private"), (0o640, "ok", "private"), (0o604, "warning", "read"), (0o602, "warning", "written")],
)  # fmt: skip
def test_readable_secret_is_reported(tmp_path, mode, level, word):
    path = private(tmp_path / "token")
    path.chmod(mode)
    finding = one(check_secrets({"ADMIN_TOKEN_FILE": path}))
    assert (finding.area, finding.level) == ("ADMIN_TOKEN_FILE", level)
    assert word in finding.what


def test_missing_secret_file_is_a_problem(tmp_path):
    finding = one(check_secrets({"X_FILE": tmp_path / "none"}))
    assert (finding.level, "No such file" in finding.what) == ("problem", True)


@pytest.fixture
def tls(tmp_path):
    """Write a certificate with the given expiry, and return the settings."""

    def make(expires=NOW + timedelta(days=365), key_mode=0o600, begins=NOW - timedelta(days=9)):
        ca = trustme.CA()
        cert = ca.issue_cert("localhost", not_before=begins, not_after=expires)
        (tmp_path / "cert").write_bytes(cert.cert_chain_pems[0].bytes())
        private(tmp_path / "key", cert.private_key_pem.bytes()).chmod(key_mode)
        (tmp_path / "ca").write_bytes(ca.cert_pem.bytes())
        return settings(
            tls_cert=tmp_path / "cert", tls_key=tmp_path / "key", tls_client_ca=tmp_path / "ca"
        )

    return make


def test_long_valid_certificates_are_fine(tls):
    findings = list(check_tls(tls(), NOW))
    assert [(finding.area, finding.level) for finding in findings] == [
        ("TLS_CERT", "ok"),
        ("TLS_CLIENT_CA", "ok"),
        ("TLS_KEY", "ok"),
    ]
    assert findings[0].what == "valid until 2031-01-01 00:00 UTC"


@pytest.mark.parametrize(
    ("left", "level"),
    [(SOON + timedelta(seconds=1), "ok"), (SOON - timedelta(seconds=1), "warning"), (timedelta(), "problem")],
)  # fmt: skip
def test_certificate_that_expires_soon_is_reported(tls, left, level):
    assert next(check_tls(tls(NOW + left), NOW)).level == level


def test_certificate_that_is_not_valid_yet_is_a_problem(tls):
    chosen = tls(begins=NOW + timedelta(minutes=1))
    first = next(check_tls(chosen, NOW))
    assert (first.level, first.what) == ("problem", "not valid before 2030-01-01 00:01 UTC")
    assert next(check_tls(chosen, NOW + timedelta(minutes=1))).level == "ok"


def test_key_readable_by_everybody_is_reported(tls):
    assert list(check_tls(tls(key_mode=0o644), NOW))[-1].level == "warning"


@pytest.mark.parametrize(("left", "level"), [(2 * SOON, "ok"), (SOON / 2, "warning")])
def test_the_certificate_for_the_shared_state_is_reported(tls, left, level):
    own = tls(NOW + left, key_mode=0o604)
    cert, key = own.tls_cert, own.tls_key
    url = f"rediss://127.0.0.1:1?ssl_certfile={cert}&ssl_keyfile={key}"
    expiry, privacy = check_store_certificate(settings(redis_url=url), NOW)
    assert expiry[:2] == ("REDIS_URL", level)
    assert expiry.what.startswith(f"{cert}: ")
    assert privacy[:2] == ("REDIS_URL", "warning")
    cert.write_text("no certificate")
    for other in (url, "redis://127.0.0.1:1", "rediss://127.0.0.1:1", ""):
        assert not [*check_store_certificate(settings(redis_url=other), NOW)]


def test_remote_pages_without_tls_are_reported(tls):
    chosen = replace(tls(), http_listen=Address("192.0.2.1", 8080))
    assert next(check_tls(chosen, NOW))[:2] == ("HTTP_TLS", "warning")
    for well in ({"http_tls": True}, {"http_listen": None}):
        assert next(check_tls(replace(chosen, **well), NOW)).area == "TLS_CERT"


def test_key_of_another_certificate_is_a_problem_of_its_setting(tls, tmp_path):
    chosen = tls()
    (tmp_path / "key").write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    finding = one(check_tls(chosen, NOW))
    assert (finding.area, finding.level) == ("TLS_KEY", "problem")
    assert "not the key" in finding.what


def test_kind_of_key_is_a_problem_if_the_transport_lacks_it_else_a_warning(tls, tmp_path):
    chosen = tls()
    certificate = self_signed("Ed448")
    (tmp_path / "cert").write_bytes(certificate.cert)
    (tmp_path / "key").write_bytes(certificate.key)
    first = next(check_tls(chosen, NOW))
    only = one(check_tls(replace(chosen, transport="grpcio"), NOW))
    for finding, level in ((first, "warning"), (only, "problem")):
        assert (finding.area, finding.level) == ("TLS_CERT", level)
        assert "kind of key" in finding.what


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_local_node_without_tls_is_fine(host):
    assert not list(check_tls(settings(listen=f"{host}:9090"), NOW))


def test_remote_node_without_tls_is_reported():
    finding = one(check_tls(settings(listen="0.0.0.0:9090"), NOW))
    assert (finding.area, finding.level) == ("TLS_CERT", "warning")


def test_rules_file_is_read_as_by_a_node(tmp_path):
    path = tmp_path / "rules.yaml"
    assert not list(check_rules_file(settings()))
    assert one(check_rules_file(settings(rules_file=path))).level == "problem"
    path.write_text("rules: []")
    assert one(check_rules_file(settings(rules_file=path))) == ("RULES_FILE", "ok", "0 rules", "")
    path.write_text(
        "rules: [{endpoint: /a, identifier_type: user, limit: 0, window_seconds: 0, algorithm: x}]"
    )
    findings = list(check_rules_file(settings(rules_file=path)))
    assert len(findings) > 1
    assert {finding.level for finding in findings} == {"problem"}
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in one(check_rules_file(settings(rules_file=path))).what


def test_missing_state_directory_will_be_created(tmp_path):
    finding = one(check_state_dir(settings(state_dir=tmp_path / "a" / "b")))
    assert (finding.level, "will be made" in finding.what) == ("ok", True)
    assert not (tmp_path / "a").exists()


def test_directory_of_recorded_checks_is_checked_if_set(tmp_path):
    assert not list(check_record_dir(settings()))
    for path in (tmp_path, tmp_path / "a"):
        found = check_record_dir(settings(record_dir=path, record_bytes=10_000_000))
        assert one(found).level == "ok"
    assert not (tmp_path / "a").exists()


def test_file_in_place_of_a_directory_is_a_problem(tmp_path):
    path = tmp_path / "file"
    path.touch(mode=0o700)
    finding = one(check_state_dir(settings(state_dir=path)))
    assert finding[:3] == ("STATE_DIR", "problem", f"{path} is not a directory")
    assert one(check_record_dir(settings(record_dir=path)))[:2] == ("RECORD_DIR", "problem")
    assert one(check_record_dir(settings(record_dir=path / "a"))).level == "problem"


@pytest.fixture
def not_allowed(monkeypatch):
    """Deny access: tests may run as root, who has all permissions."""
    monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), "access": lambda *_: False}))


def test_directory_that_cannot_be_created_or_written_is_a_problem(tmp_path, not_allowed):
    for path in (tmp_path / "a", tmp_path):
        assert one(check_state_dir(settings(state_dir=path))).level == "problem"
        finding = one(check_record_dir(settings(record_dir=path)))
        assert (finding.area, finding.level) == ("RECORD_DIR", "problem")


def test_state_directory_that_cannot_be_locked_is_a_problem(tmp_path, monkeypatch):
    def is_held(_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / LOCK_NAME).touch()
    monkeypatch.setattr(files, "is_held", is_held)
    found = one(check_state_dir(settings(state_dir=tmp_path)))
    assert (found.level, "cannot be locked: No locks" in found.what) == ("problem", True)


def test_state_directory_in_use_is_reported(tmp_path):
    path = tmp_path / "state"
    with_lock = StateDir.lock(path)
    assert one(check_state_dir(settings(state_dir=path))).what.endswith("in use by a running node")
    with_lock.close()
    assert one(check_state_dir(settings(state_dir=path))).what.endswith("free")
    (path / "lock").unlink()
    assert one(check_state_dir(settings(state_dir=path))).what.endswith("free")
    path.chmod(0o755)
    assert one(check_state_dir(settings(state_dir=path))).level == "warning"


def test_nearly_full_disk_is_reported(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=5 << 20))
    first, _ = check_state_dir(settings(state_dir=Path(tmp_path)))
    assert (first.level, first.what) == ("warning", "5 MiB are free, and up to 256 are needed")


def test_disk_without_room_for_the_rest_of_the_trace_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=15 << 20))
    given = settings(record_dir=tmp_path, record_bytes=20 << 20)
    (tmp_path / "other.trace").write_bytes(bytes(6 << 20))
    found = one(check_record_dir(given))
    assert (found.area, found.level) == ("RECORD_DIR", "warning")
    assert found.what == "15 MiB are free, and up to 20 are needed"
    (tmp_path / f"{1:016d}-{2:016x}.trace").write_bytes(bytes(6 << 20))
    assert one(check_record_dir(given)).level == "ok"
