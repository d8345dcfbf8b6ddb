"""Generate code and documents (`--write`), or fail when the committed ones differ (`--check`).

The sources are the wire contract in proto/, and the asyncio clients: the blocking ones differ from them in keywords and
names only (``SYNC_NAMES``).
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
CLIENT = ROOT / "clients" / "python"
TARGET = CLIENT / "src"
DOCUMENT = ROOT / "src" / "ratelimitd" / "web" / "openapi.json"
THIRD_PARTY = ROOT / "third_party"
DESCRIPTORS = ROOT / "src" / "ratelimitd" / "services" / "envoy_descriptors.binpb"

SYNC_TWINS = {
    "ratelimitd_client/async_client.py": "ratelimitd_client/client.py",
    "ratelimitd_client/async_hold.py": "ratelimitd_client/hold.py",
    "ratelimitd_client/async_node_client.py": "ratelimitd_client/node_client.py",
}
"""The asyncio modules, and the blocking modules that are generated from them."""

SYNC_NAMES = (
    (r" +# asyncio only:\n(?:[^\n]+\n)+\n", ""),
    (r"\basync (?=(def|with|for)\b)", ""),
    (r"\bawait ", ""),
    (r"for (\w+) in ([\w.]+):\n +yield \1\n", r"yield from \2\n"),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\bAsync([A-Z])", r"\1"),
    (r"\basync_(?=\w*(client|hold|sessions)\b)", ""),
    (r"\nimport asyncio(?=\nimport time\n)", ""),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\bgrpc\.aio\.AioRpcError\b", "grpc.RpcError"),
    (r"\bgrpc\.aio\b", "grpc"),
)
"""Regular expressions and their replacements, applied in this order."""

# pip installs the plugins of mypy-protobuf next to the interpreter.
SCRIPTS = Path(sys.executable).parent


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--write", action="store_true", help="write the generated code into clients/python/src"
    )
    mode.add_argument(
        "--check",
        action="store_true",
        help="fail when the committed code is not what would be generated",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        fresh = read_tree(Path(directory))
    twins = sync_twins()
    if arguments.write:
        for name, text in fresh.items():
            (TARGET / name).write_text(text)
        for name, text in twins.items():
            (TARGET / name).write_text(text)
        DOCUMENT.write_text(openapi_document())
        DESCRIPTORS.write_bytes(third_party_descriptors())
        return 0
    problems = [
        *differences(read_tree(TARGET), fresh),
        *differences({name: read_or_empty(TARGET / name) for name in twins}, twins),
        *outdated_bounds("\n".join(fresh.values())),
    ]
    if DOCUMENT.read_text() != openapi_document():
        problems.append("openapi.json differs: run `make proto` and commit the result")
    if DESCRIPTORS.read_bytes() != third_party_descriptors():
        problems.append("envoy_descriptors.binpb differs: run `make proto` and commit the result")
    print("\n".join(problems) or "generated code: current")
    return 1 if problems else 0


def generate(directory: Path) -> None:
    """Run protoc over every contract, into `directory`."""
    plugins = [
        f"--plugin={name}={SCRIPTS / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    outputs = [
        f"--{kind}_out={directory}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
    ]
    contracts = [str(path.relative_to(PROTO)) for path in sorted(PROTO.rglob("*.proto"))]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTO}",
        *plugins,
        *outputs,
        *contracts,
    ]
    # The plugins report every file they write; only failures matter.
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    if result.returncode:
        raise SystemExit(result.stderr)


def third_party_descriptors() -> bytes:
    """Return the descriptors of third-party contracts, each after its imports."""
    contracts = sorted(THIRD_PARTY.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "descriptors.binpb"
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={THIRD_PARTY}",
            "--include_imports",
            f"--descriptor_set_out={target}",
            *(str(path.relative_to(THIRD_PARTY)) for path in contracts),
        ]
        subprocess.run(command, check=True)
        return target.read_bytes()


def openapi_document() -> str:
    """Return the OpenAPI document as it would be generated."""
    command = [sys.executable, "-m", "tools.openapi_document"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    return result.stdout


def read_tree(directory: Path) -> dict[str, str]:
    """Return the generated files below `directory` by relative name."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for pattern in ("*_pb2*.py", "*_pb2*.pyi")
        for path in sorted(directory.rglob(pattern))
    }


def read_or_empty(path: Path) -> str:
    """Return the text of a file, empty if it does not exist."""
    return path.read_text() if path.exists() else ""


def sync_twins() -> dict[str, str]:
    """Return the blocking modules by relative name, generated from the asyncio ones."""
    return {
        twin: formatted(synchronous((TARGET / source).read_text(), source), TARGET / twin)
        for source, twin in SYNC_TWINS.items()
    }


def synchronous(text: str, source: str) -> str:
    """Return the blocking form of an asyncio module, whose first line says that it is a source."""
    _, _, text = text.partition("\n")
    for pattern, replacement in SYNC_NAMES:
        text = re.sub(pattern, replacement, text)
    return f"# Generated from {Path(source).name} by `make proto` (tools/generated_code.py). Do not edit.\n{text}"


def formatted(text: str, path: Path) -> str:
    """Return Python code with sorted imports, formatted as `make format` would do at `path`."""
    for arguments in (("check", "--quiet", "--fix", "--select=I"), ("format", "--quiet")):
        command = [SCRIPTS / "ruff", *arguments, f"--stdin-filename={path}", "-"]
        text = subprocess.run(
            command, cwd=ROOT, input=text, capture_output=True, text=True, check=True
        ).stdout
    return text


def differences(committed: dict[str, str], fresh: dict[str, str]) -> list[str]:
    """Return a diff for every committed file that differs from its generated form."""
    lines: list[str] = []
    for name in sorted(fresh.keys() | committed.keys()):
        before, after = committed.get(name, "").splitlines(), fresh.get(name, "").splitlines()
        lines += difflib.unified_diff(
            before, after, f"committed/{name}", f"generated/{name}", lineterm=""
        )
    return (
        [*lines, "generated code differs: run `make proto` and commit the result"] if lines else []
    )


def outdated_bounds(code: str) -> list[str]:
    """Compare the runtime versions that the generated code requires with the client's metadata."""
    protobuf = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", code)
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", code)
    if protobuf is None or grpcio is None:
        return [
            "generated code: no runtime version found in it; has the generator changed its output?"
        ]
    demanded = {f"protobuf>={'.'.join(protobuf.groups())},<8", f"grpcio>={grpcio[1]}"}
    promised = set(
        tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]["dependencies"]
    )
    if demanded <= promised:
        return []
    return [
        f"clients/python/pyproject.toml: dependencies are {sorted(promised)}, the code needs {sorted(demanded)}"
    ]


if __name__ == "__main__":
    raise SystemExit(main())
