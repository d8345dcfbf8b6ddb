"""A whole node that serves HTTP over TLS, with the files of its gRPC port."""

import ssl

import httpx
import pytest
import trustme

from ratelimitd.cli.doctor.finding import check_ports
from ratelimitd.errors import StartupError
from ratelimitd.settings.table import Settings
from ratelimitd.testing import running_node
from tests.page_visitor import PageVisitor


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture
def trusting(ca):
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


@pytest.fixture
def tls(tmp_path, ca):
    """Settings of TLS, with a CA of client certificates for gRPC."""
    certificate = ca.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key")}
    settings = {f"tls_{name}": path for name, path in files.items()}
    return {**settings, "tls_client_ca": tmp_path / "ca.pem", "http_tls": "on"}


async def test_pages_probes_and_json_are_served_over_tls_without_a_client_certificate(
    tls, trusting
):
    async with (
        running_node(**tls) as node,
        httpx.AsyncClient(base_url=f"https://{node.http_address}", verify=trusting) as http,
    ):
        for path in ("/healthz", "/readyz", "/metrics", "/login"):
            assert (await http.get(path)).status_code == 200
        check = {"identifier": "u", "identifierType": "user", "endpoint": "/a"}
        assert (await http.post("/v1/check", json=check)).json()["allowed"]


async def test_a_session_over_tls_is_secure(tls, trusting):
    async with (
        running_node(**tls, admin_token="t") as node,
        PageVisitor(node.http_address, verify=trusting) as visitor,
    ):
        answer = await visitor.log_in("t")
        assert answer.status_code == 303
        cookies = answer.headers.get_list("set-cookie")
        assert cookies
        assert all("Secure" in cookie for cookie in cookies)
        assert (await visitor.get("/rules")).status_code == 200


async def test_a_login_link_names_the_scheme(tls, trusting, tmp_path):
    given = {**tls, "loopback_admin": "off", "state_dir": tmp_path / "state"}
    async with running_node(**given) as node:
        assert node.login_link.startswith(f"https://{node.http_address}/login?code=")
        async with httpx.AsyncClient(verify=trusting) as http:
            assert (await http.get(node.login_link)).status_code == 303


async def test_without_the_setting_http_stays_plaintext(tls):
    async with running_node(**{**tls, "http_tls": "off"}) as node, httpx.AsyncClient() as http:
        assert (await http.get(f"http://{node.http_address}/healthz")).status_code == 200


async def test_unusable_files_end_the_start(tls):
    tls["tls_key"].write_text("no key")
    with pytest.raises(StartupError, match=r"TLS_KEY: .* holds no unencrypted PEM private key"):
        async with running_node(**tls):
            pass


async def test_doctor_recognises_a_node_by_its_answer_over_tls(tls):
    async with running_node(**tls) as node:
        given = {**tls, "http_listen": node.http_address}
        flags = {name.upper(): str(value) for name, value in given.items()}
        findings = await check_ports(Settings.load({}, flags))
        flags["HTTP_TLS"] = "off"
        others = await check_ports(Settings.load({}, flags))
    assert (findings[1].area, findings[1].level) == ("HTTP_LISTEN", "ok")
    assert "a ratelimitd listens there" in findings[1].what
    assert others[1].level == "problem"
