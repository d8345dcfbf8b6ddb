"""Checks that the pins match their inputs: pyproject.toml, requirements/*.in and requirements/*.txt agree."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("src/ratelimitd/__init__.py", "clients/python/src/ratelimitd_client/__init__.py")
"""Files with the versions of the two distributions, which are released together."""


def main() -> int:
    """Run all checks; return the exit status."""
    problems = [*version_problems(), *metadata_problems(), *pin_problems()]
    print("\n".join(problems) or "pins: they agree with what is asked for")
    return 1 if problems else 0


def asked(name: str) -> list[Requirement]:
    """Return the requirements of requirements/<name>.in."""
    lines = (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines()
    bare = (line.split("#")[0].strip() for line in lines)
    return [Requirement(line) for line in bare if line and not line.startswith("-")]


def version_in(path: str) -> str:
    """Return the version that a package declares."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def version_problems() -> Iterator[str]:
    """Compare the versions of the two distributions."""
    versions = {path: version_in(path) for path in VERSIONS}
    if len(set(versions.values())) > 1:
        yield f"the server and its client have different versions: {versions}"


def metadata_problems() -> Iterator[str]:
    """Compare the dependencies of the distribution with requirements/base.in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {str(Requirement(text)) for text in project["dependencies"]}
    # The client of this checkout is not pinned: the server needs the client of its own version.
    own_client = Requirement(f"ratelimitd-client=={version_in(VERSIONS[0])}")
    wanted = {str(requirement) for requirement in [*asked("base"), own_client]}
    for text in sorted(declared ^ wanted):
        where = "pyproject.toml" if text in declared else "requirements/base.in"
        yield f"{text}: only in {where}"
    extras = project["optional-dependencies"]
    if {str(Requirement(text)) for text in extras["workers"]} != set(map(str, asked("workers"))):
        yield "the extra workers and requirements/workers.in are not the same"
    tested = {str(requirement) for requirement in asked("dev")}
    for name, extra in extras.items():
        for text in sorted({str(Requirement(text)) for text in extra} - tested):
            yield f"{text}: in the extra {name}, but not in requirements/dev.in"


def pin_problems() -> Iterator[str]:
    """Compare each list of pins with its input, and look for addresses of an index or of this machine."""
    for name in ("build", "base", "workers", "dev"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
        pins = {
            canonicalize_name(pin): version
            for pin, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
        }
        for requirement in asked(name):
            version = pins.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version):
                yield f"requirements/{name}.txt: {requirement} is asked for, pinned is {version}: run `make pins`"
        if re.search(r"://|^-", text, re.MULTILINE):
            yield f"requirements/{name}.txt: must hold pins and hashes only, no address and no option"


if __name__ == "__main__":
    raise SystemExit(main())
