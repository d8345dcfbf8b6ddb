from importlib.resources import files

import pytest

from ratelimitd.cluster.redis.codec import LIBRARY, SHEBANG, Script, load

SCRIPTS = {
    "settle": (),
    "decide": ("concurrency.lua",),
    "first_check": (),
    "reset": ("concurrency.lua",),
    "hold": ("concurrency.lua", "holds.lua"),
    "hold_step": ("concurrency.lua", "holds.lua"),
}
"""Files that each script includes beyond the library."""


def test_a_script_has_the_digest_that_the_server_uses():
    script = Script(b"return 1")
    assert script.text == b"return 1"
    assert script.sha == b"e0e1f9fabfc9d4800c877a703b823ac0578ff8db"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loaded_script_is_complete_and_deterministic(name):
    script = load(name, *SCRIPTS[name])
    assert script.text.startswith(SHEBANG.encode())
    for part in (*LIBRARY, *SCRIPTS[name], f"{name}.lua"):
        assert (files("ratelimitd.cluster.redis") / "scripts" / part).read_bytes() in script.text
    assert script.sha == load(name, *SCRIPTS[name]).sha


def test_the_scripts_differ():
    assert len({load(name, *more).sha for name, more in SCRIPTS.items()}) == len(SCRIPTS)
