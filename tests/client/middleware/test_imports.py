"""What an application loads with the middleware: of frameworks, its own and no other."""

import subprocess
import sys

LOADED = """
import sys
import {module}
print(*{{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names))
"""


def test_what_frameworks_share_and_the_middleware_for_asgi_load_none():
    code = LOADED.format(module="ratelimitd_client.middleware.asgi")
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert "ratelimitd_client" in loaded
    assert not loaded & {"aiohttp", "django", "fastapi", "flask", "starlette", "uvicorn"}
