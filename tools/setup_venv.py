"""Creates `.venv` in the checkout from the hashed pins; does nothing if it is current.

`--to-serve` installs only the requirements of a node: a tenth of those of tests and linters. `--to-serve-with-workers`
adds the Valkey of several workers.

Runs before anything is installed, so it needs only the standard library, and its syntax lets an interpreter that is too
old for the project parse it and report the problem.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

OLDEST = (3, 11)
NEWER_NAMES = ("python3.14", "python3.13", "python3.12", "python3.11")
ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ratelimitd-setup.sha256"
REQUIREMENTS = ROOT / "requirements"
TO_SERVE = ("build.txt", "base.txt")
WITH_WORKERS = (*TO_SERVE, "workers.txt")
ALL = (*WITH_WORKERS, "dev.txt")
LISTS = (TO_SERVE, WITH_WORKERS, ALL)  # each includes the one before
EDITABLE = (ROOT, ROOT / "clients" / "python")


def main() -> int:
    """Bring `.venv` up to date; return the exit status."""
    if sys.version_info < OLDEST:
        return use_newer_python()
    options = {"--to-serve": TO_SERVE, "--to-serve-with-workers": WITH_WORKERS}
    names = options.get(" ".join(sys.argv[1:]), ALL)
    if is_current(names):
        return 0
    import fcntl  # noqa: PLC0415 - POSIX only; the version message above must come first everywhere

    # Two `make` runs in one checkout must not install concurrently; the second finds the work done. The lock is outside
    # `.venv`, which may be deleted while it is held.
    with (ROOT / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(names):
            install(names)
    return 0


def use_newer_python() -> int:
    """Run this file again with a Python that is new enough, or report that none was found."""
    for name in NEWER_NAMES:
        path = shutil.which(name)
        # A pyenv shim exists even for versions that are not selected, so test that it runs.
        if path and subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            os.execv(path, [path, *sys.argv])
    found = ".".join(map(str, sys.version_info[:3]))
    sys.stderr.write(
        "ratelimitd needs Python 3.11 or newer; {} is {}, and none of {} works.\n"
        "Install one, or name it: make setup PYTHON=/path/to/python3.12\n".format(
            sys.executable, found, ", ".join(NEWER_NAMES)
        )
    )
    return 1


def fingerprint(names: tuple[str, ...]) -> str:
    """Return a hash of everything that determines what these files of pins install."""
    import tomllib  # noqa: PLC0415 - unknown to interpreters that are too old

    digest = hashlib.sha256(f"{sys.version_info[:2]}\n{ROOT}\n".encode())
    for name in names:
        digest.update((REQUIREMENTS / name).read_bytes())
    for directory in EDITABLE:
        settings = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))
        # The rest of the file configures linters and tests; editing that requires no installation.
        installed = [settings["build-system"], settings["project"], settings["tool"]["setuptools"]]
        digest.update(json.dumps(installed, sort_keys=True).encode())
    return digest.hexdigest()


def is_current(names: tuple[str, ...]) -> bool:
    """Return whether `.venv` works and was made from exactly these inputs, or from a list that includes them all."""
    if not (VENV_PYTHON.exists() and STAMP.exists()):
        return False
    return STAMP.read_text() in map(fingerprint, LISTS[LISTS.index(names) :])


def install(names: tuple[str, ...]) -> None:
    """Create or update `.venv`; stamp it last, so that an interrupted run is repeated."""
    size = "150 MB" if names != ALL else "1.5 GB, some minutes"
    print(f"setup: installing the pinned packages into .venv: {size}", flush=True)
    STAMP.unlink(missing_ok=True)
    pip = make_venv()
    pinned = [word for name in names for word in ("-r", str(REQUIREMENTS / name))]
    run([*pip, "install", "--quiet", "--require-hashes", *pinned])
    editable = [word for path in EDITABLE for word in ("-e", str(path))]
    run([*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", *editable])
    STAMP.write_text(fingerprint(names))


def make_venv() -> list[str]:
    """Make sure that `.venv` has this interpreter; return the pip command that installs into it."""
    flags = ["--disable-pip-version-check", "--no-input"]
    if not venv_matches():
        shutil.rmtree(VENV, ignore_errors=True)
    # Debian packages ensurepip separately (python3-venv); without it, use an external pip.
    if subprocess.call([sys.executable, "-c", "import ensurepip"], stderr=subprocess.DEVNULL) == 0:
        if not VENV.exists():
            run([sys.executable, "-m", "venv", str(VENV)])
        return [str(VENV_PYTHON), "-m", "pip", *flags]
    if not VENV.exists():
        run([sys.executable, "-m", "venv", "--without-pip", str(VENV)])
    return [sys.executable, "-m", "pip", "--python", str(VENV_PYTHON), *flags]


def venv_matches() -> bool:
    """Return whether `.venv` runs and has the minor version of this interpreter."""
    if not VENV_PYTHON.exists():
        return False
    code = "import sys; print(sys.version_info[:2])"
    answer = subprocess.run(
        [str(VENV_PYTHON), "-c", code], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() == str(sys.version_info[:2])


def run(command: list[str]) -> None:
    """Run a command, or end with its exit status and its name."""
    status = subprocess.call(command, cwd=str(ROOT))
    if status:
        sys.stderr.write("setup: failed: {}\n".format(" ".join(command)))
        raise SystemExit(status)


if __name__ == "__main__":
    raise SystemExit(main())
