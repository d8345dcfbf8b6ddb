"""What an application gets with the client: grpcio, protobuf, and nothing else."""

import subprocess
import sys

LOADED = """
import sys
import {modules}
print(*{{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names))
"""


def loaded_with(modules):
    code = LOADED.format(modules=modules)
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_it_loads_nothing_but_grpcio_and_protobuf():
    # Not the other way round: grpcio itself takes up packages of its own where they are installed.
    ours = loaded_with("ratelimitd_client, ratelimitd_client.testing")
    assert ours - loaded_with("grpc, google.protobuf") == {"ratelimitd_client", "ratelimiter"}
