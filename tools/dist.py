"""Build both distributions of the last commit, as sdist and wheel, and their list of materials: `make dist`.

The same commit and pins give the same bytes: sources come from git, every time stamp is the commit's, and order, owner
and umask do not count. Each wheel is built from its sdist, so an incomplete sdist fails here.
"""

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = ("clients/python", ".")
"""Directories of the distributions: the client, which the server requires, and the server."""
MATERIALS = ("base.txt", "workers.txt")
"""Pins in the list of materials: those of the image."""
SUFFIXES = (".whl", ".tar.gz", ".cdx.json")


def main() -> int:
    """Build into the directory that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", default=ROOT / "dist")
    target = parser.parse_args().target.resolve()
    if run("git", "status", "--porcelain"):
        print("dist: changes that are not committed are left out", file=sys.stderr)
    target.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)  # a wheel keeps the modes of its files
    with tempfile.TemporaryDirectory() as directory:
        built = build(Path(directory))
        for old in target.iterdir():
            if old.name.startswith("ratelimitd") and old.name.endswith(SUFFIXES):
                old.unlink()
        for name, content in built.items():
            (target / name).write_bytes(content)
    print("\n".join(f"dist: {target / name}" for name in sorted(built)))
    return 0


def build(scratch: Path) -> dict[str, bytes]:
    """Return the files of the last commit's distributions by name; requires an empty directory."""
    epoch = int(run("git", "log", "-1", "--format=%ct"))
    sources, out = scratch / "sources", scratch / "out"
    archive = subprocess.run(  # not by run(), which returns text
        ["git", "-c", "tar.umask=0022", "archive", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    sources.mkdir()
    # Not by tarfile, whose filters Python has since 3.11.4.
    subprocess.run(["tar", "-x", "--no-same-owner", "-C", sources], input=archive, check=True)
    shutil.copy(sources / "LICENSE", sources / PROJECTS[0])  # each distribution carries it
    uv = str(Path(sys.executable).with_name("uv"))
    options = ("--offline", "--no-build-isolation", "--python", sys.executable)
    for project in PROJECTS:
        run(
            uv,
            "build",
            "--quiet",
            *options,
            "--out-dir",
            str(out),
            str(sources / project),
            epoch=epoch,
        )
    files = {
        file.name: file.read_bytes() for file in out.iterdir() if file.suffix in {".gz", ".whl"}
    }
    [version] = {
        name.removesuffix(".tar.gz").rsplit("-", 1)[1] for name in files if name.endswith(".tar.gz")
    }
    materials = list_of_materials(sources, version, epoch)
    plain = {
        name: repacked(content, epoch) if name.endswith(".tar.gz") else content
        for name, content in files.items()
    }
    return {**plain, f"ratelimitd-{version}.cdx.json": materials}


def repacked(sdist: bytes, epoch: int) -> bytes:
    """Return an sdist without the data that setuptools takes from the clock and the machine."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as old,
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry in sorted(old.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    return packed.getvalue()


def list_of_materials(sources: Path, version: str, epoch: int) -> bytes:
    """Return a CycloneDX document of the pinned packages, each with the hashes that pip accepts."""
    pins = sources / "pins.txt"
    pins.write_text(
        "".join((sources / "requirements" / name).read_text("utf-8") for name in MATERIALS)
    )
    # The tool cannot resolve setuptools' dynamic version.
    project = sources / "pyproject.toml"
    text = project.read_text("utf-8").replace('dynamic = ["version"]', f'version = "{version}"')
    project.write_text(text, "utf-8")
    options = ("--spec-version", "1.6", "--output-reproducible", "--pyproject", str(project))
    command = (sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements")
    return run(*command, *options, str(pins), epoch=epoch).encode()


def run(*command: str, epoch: int | None = None) -> str:
    """Return the output of a command, with time stamps set to ``epoch``; exit if it fails."""
    environ = {**os.environ, **({"SOURCE_DATE_EPOCH": str(epoch)} if epoch is not None else {})}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        print(f"dist: failed: {' '.join(command)}", file=sys.stderr)
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
