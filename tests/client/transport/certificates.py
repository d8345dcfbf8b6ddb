"""Certificates of one authority, and the credentials of a gRPC server that shows them."""

import grpc
import trustme

from ratelimitd_client import Tls

AUTHORITY = trustme.CA()
SERVER = AUTHORITY.issue_cert("localhost", "127.0.0.1")
CALLER = AUTHORITY.issue_cert("caller.internal")

TRUSTING = Tls(ca=AUTHORITY.cert_pem.bytes())
MUTUAL = Tls(
    ca=TRUSTING.ca, cert=CALLER.cert_chain_pems[0].bytes(), key=CALLER.private_key_pem.bytes()
)
STRANGER = Tls(ca=trustme.CA().cert_pem.bytes())
"""Trusts another authority."""


def server_credentials(*, mutual):
    return grpc.ssl_server_credentials(
        [(SERVER.private_key_pem.bytes(), SERVER.cert_chain_pems[0].bytes())],
        root_certificates=TRUSTING.ca if mutual else None,
        require_client_auth=mutual,
    )
