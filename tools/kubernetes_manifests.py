"""Write the manifests of deploy/kubernetes from the chart (`--write`), or fail when they differ from it (`--check`)."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "ratelimitd"
HELM = ROOT / ".venv" / "go" / "helm"
TARGET = ROOT / "deploy" / "kubernetes"
HEAD = "# Made from deploy/helm/ratelimitd with its defaults: `make manifests`.\n"
HOOKS = "templates/database-upgrade.yaml"
"""Applied first: by Helm automatically, with kubectl by hand."""


def main() -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    write = parser.parse_args().write
    differ = []
    for path, text in manifests().items():
        if write:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            differ.append(str(path.relative_to(ROOT)))
    for path_text in differ:
        print(f"{path_text}: differs from the chart: run `make manifests`", file=sys.stderr)
    if not differ:
        print("manifests: current")
    return 1 if differ else 0


def manifests() -> dict[Path, str]:
    """Return the expected content of deploy/kubernetes by path."""
    return {
        TARGET / "ratelimitd.yaml": HEAD + rendered(["--no-hooks"]),
        TARGET / "database-upgrade.yaml": HEAD + rendered(["--show-only", HOOKS]),
    }


def rendered(options: Sequence[str] = (), release: str = "ratelimitd") -> str:
    """Return the output of `helm template` for a release in the namespace ``ratelimitd``.

    Raises:
        CalledProcessError: Helm refuses the values; its ``stderr`` says why.
    """
    command = [str(HELM), "template", release, str(CHART), "--namespace", "ratelimitd", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
