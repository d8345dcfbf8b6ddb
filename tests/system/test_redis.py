"""What talks to the shared state, once more on a real Redis: the tests themselves run elsewhere on Valkey.

Debian 12 has Redis 7.0, the oldest that is promised.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

PARTS = {
    "links": ["tests/unit/cluster/redis"],
    "scripts": [
        "tests/conformance/test_store_scripts.py",
        "tests/property/test_scripts_against_the_ledger.py",
    ],
    "nodes": [
        "tests/cluster/test_faults.py",
        *("-k", "forbidden or memory or read-only or gone or reset or confirmed"),
    ],
}


@pytest.mark.parametrize("part", PARTS)
def test_what_holds_on_valkey_holds_on_redis(tmp_path, part):
    server = shutil.which("redis-server")
    assert server, "no redis-server: run the tests by `make test-system`, which installs it"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--basetemp", str(tmp_path / "run"), "--store-server", server, *PARTS[part]),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
