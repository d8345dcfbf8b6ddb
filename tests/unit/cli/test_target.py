"""The connection options: address, credentials, and that no secret is ever shown."""

import grpc
import pytest
import trustme

from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.cli import client_options as module
from ratelimitd.cli.client_options import Target
from ratelimitd.node.admin_token import own_admin_token
from tests.fake_node import fake_node, status

SECRET = "s3cret-token"


def test_token_of_a_file_is_sent_without_its_line_end(ask, node, tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    assert ask("health", "--token-file", file).status == 0
    assert node.seen[0].metadata["authorization"] == f"Bearer {SECRET}"


def test_token_may_come_from_the_command_line_or_the_environment(ask, node, monkeypatch):
    ask("metrics", "--token", SECRET)
    monkeypatch.setenv("RATELIMITD_TOKEN", "another")
    ask("metrics")
    assert [call.metadata["authorization"] for call in node.seen] == [
        f"Bearer {SECRET}",
        "Bearer another",
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--token", SECRET, "--token-file", "file"], "--token and --token-file"),
        (["--cert", "file"], "--cert and --key together"),
        (["--key", "file"], "--cert and --key together"),
        (["--token-file", "/does/not/exist"], "--token-file: cannot read /does/not/exist: No such"),
        (["--token-file", "/dev/null"], "--token-file: /dev/null is empty"),
        (["--ca", "/does/not/exist"], "--ca: cannot read /does/not/exist: No such file"),
        (["--token", "two words"], "a bearer token is made of"),
        (["--timeout", "0"], "--timeout"),
        (["--target", ""], "--target must be HOST:PORT"),
        (["--target", "localhost"], "--target must be HOST:PORT, such as 127.0.0.1:9090"),
        (["--target", "http://localhost:9090"], "--target must be HOST:PORT"),
        (["--ca", __file__], "--ca must be PEM with a certificate"),
    ],
)
def test_unusable_options_are_status_2_without_a_call(ask, node, options, problem):
    ended = ask("health", *options)
    assert ended.status == 2
    assert problem in ended.err
    assert node.seen == []
    assert SECRET not in ended.err
    assert "two words" not in ended.err


def test_token_of_the_local_node_is_sent_to_that_node_only(ask, node, tmp_path, monkeypatch):
    state_dir = StateDir.lock(tmp_path / "state")
    made = own_admin_token(state_dir.path)
    monkeypatch.setenv("RATELIMITD_STATE_DIR", str(state_dir.path))
    state_dir.publish("127.0.0.1:1", made_token=True)
    ask("metrics")
    state_dir.publish(node.address, made_token=True)
    ask("metrics")
    ask("metrics", "--token", SECRET)
    state_dir.close()
    ask("metrics")
    sent = [call.metadata.get("authorization") for call in node.seen]
    assert sent == [None, f"Bearer {made}", f"Bearer {SECRET}", None]


def test_localhost_is_the_local_node_and_a_missing_token_is_explained(
    run, node, tmp_path, monkeypatch
):
    state_dir = StateDir.lock(tmp_path / "state")
    made = own_admin_token(state_dir.path)
    monkeypatch.setenv("RATELIMITD_STATE_DIR", str(state_dir.path))
    state_dir.publish(node.address, made_token=True)
    local = node.address.replace("127.0.0.1", "localhost")
    assert run("health", "--target", local).status == 0
    assert node.seen[0].metadata["authorization"] == f"Bearer {made}"
    state_dir.close()
    need = "this call needs the read role: the bearer token in STATE_DIR/admin-token; no valid one was sent"
    node.error = status(grpc.StatusCode.UNAUTHENTICATED, need)
    refused = run("health", "--target", local)
    give = "give --token-file, --cert and --key, or RATELIMITD_STATE_DIR of a node on this host"
    assert refused == (
        1,
        "",
        (
            "Error: this call needs the read role, and no token was found:"
            f" no node that generated one runs in {state_dir.path}; {give}\n"
        ),
    )
    wrong = run("health", "--target", local, "--token", SECRET)
    assert wrong.err == f"Error: unauthenticated: {need} ({give})\n"


def test_argument_that_is_not_text_is_status_2(ask, node):
    ended = ask("check", "user", "\udcff", "/x")
    assert ended == (2, "", "Error: an argument is not valid UTF-8\n")
    assert node.seen == []


def test_endless_file_is_read_up_to_a_bound(ask):
    ended = ask("health", "--token-file", "/dev/zero")
    assert ended.status == 2
    assert f"larger than {module.MAX_FILE_BYTES} bytes" in ended.err


def test_token_file_that_is_not_text_is_refused_without_showing_it(ask, tmp_path):
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    assert ask("health", "--token-file", tmp_path / "token").status == 2


def test_ca_enables_tls_and_the_client_certificate_is_sent(run, tmp_path):
    authority = trustme.CA()
    server, caller = authority.issue_cert("localhost"), authority.issue_cert("caller")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    caller.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    caller.private_key_pem.write_to_path(tmp_path / "key.pem")
    credentials = grpc.ssl_server_credentials(
        [(server.private_key_pem.bytes(), server.cert_chain_pems[0].bytes())],
        root_certificates=authority.cert_pem.bytes(),
        require_client_auth=True,
    )
    identity = ["--cert", tmp_path / "cert.pem", "--key", tmp_path / "key.pem"]
    with fake_node(credentials) as node:
        command = ["health", "--target", node.address]
        assert run(*command, "--ca", tmp_path / "ca.pem", *identity).status == 0
        plain = run(*command)
        nameless = run(*command, "--ca", tmp_path / "ca.pem")
        stranger = run(*command, *identity)
    assert plain.status == nameless.status == stranger.status == 2
    hint = "is --ca right? a node that asks for client certificates (mTLS) needs --cert and --key"
    assert hint in nameless.err
    assert "a node with TLS needs --ca" in plain.err
    assert "are --ca, --cert and --key right?" in stranger.err


def test_unreachable_node_is_status_2_in_one_line(run):
    ended = run("health", "--target", "127.0.0.1:1", "--timeout", "5")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "cannot reach a node at 127.0.0.1:1: " in ended.err


def test_hanging_node_is_abandoned_after_the_timeout(ask, node):
    node.answering.clear()
    ended = ask("health", "--timeout", "0.05")
    assert ended.status == 2
    assert f"no answer from {node.address} within 0.05 s" in ended.err


def test_target_never_shows_its_token():
    assert SECRET not in repr(Target("host:1", 5, token=SECRET))
