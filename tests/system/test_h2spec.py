"""h2spec, the conformance suite for HTTP/2 servers, against the installed command: everything passes."""

import subprocess
from xml.etree import ElementTree as ET

import httpx
import pytest

from tests.system.process import START_S, Files
from tests.system.programs import Certificates, program

pytestmark = pytest.mark.system

TESTS = 146
"""What its suites generic, http2 and hpack hold: the usual 145, and one that it runs with --strict alone."""


@pytest.mark.parametrize("encrypted", [False, True], ids=["plaintext", "tls"])
def test_the_native_transport_passes_every_test_and_lives_on(tmp_path, encrypted):
    arguments = Certificates(tmp_path).arguments if encrypted else []
    report = tmp_path / "h2spec.xml"
    with Files(tmp_path).serving("--transport", "native", *arguments) as node:
        host, _, port = node.grpc_address.rpartition(":")
        command = [
            *(program("h2spec"), "generic", "http2", "hpack"),
            *("--strict", "--host", host, "--port", port, "--junit-report", str(report)),
            *(["--tls", "--insecure"] if encrypted else []),
        ]
        subprocess.run(command, capture_output=True, timeout=START_S, check=False)
        assert httpx.get(f"http://{node.http_address}/readyz").status_code == 200
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 -- written by a program we built
    not_passed = [f"{case.get('package')}: {case.get('classname')}" for case in cases if len(case)]
    assert not_passed == []
    assert len(cases) == TESTS
