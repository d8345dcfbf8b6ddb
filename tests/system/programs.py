"""The programs in Go that the end-to-end tests run, and certificates for nodes that they ask over TLS."""

import sys
from pathlib import Path

import trustme

_BUILT = Path(sys.prefix) / "go"


def program(name: str) -> str:
    """The path of a program that ``tools/system_packages.sh`` built."""
    path = _BUILT / name
    assert path.exists(), f"{path} is missing: run the tests by `make test-system`, which builds it"
    return str(path)


class Certificates:
    """An authority, and a certificate of a node called localhost at 127.0.0.1, as files in a directory."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        mine = authority.issue_cert("localhost", "127.0.0.1")
        self.ca = directory / "ca.pem"
        self._cert, self._key = directory / "cert.pem", directory / "key.pem"
        authority.cert_pem.write_to_path(self.ca)
        mine.private_key_pem.write_to_path(self._key)
        self._cert.write_bytes(b"".join(pem.bytes() for pem in mine.cert_chain_pems))

    @property
    def arguments(self) -> list[str]:
        """What makes ``serve`` use them."""
        return ["--tls-cert", str(self._cert), "--tls-key", str(self._key)]
