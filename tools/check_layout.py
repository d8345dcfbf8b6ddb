"""Check that tests/unit mirrors src/ratelimitd, and (`--coverage`) that each core module is covered by its own tests.

Coverage of a whole test run says little: a module can be green because its callers happen to pass through it. So each
module of the core is measured alone, by its own test file alone, and must reach every line and every branch. The idea
is that of the websockets project.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ratelimitd"
UNIT_TESTS = ROOT / "tests" / "unit"

EXEMPT = {
    "**/__main__.py": "a call of main(); the end-to-end tests start the installed command",
    "rules/migrations/**/*.py": "alembic runs them; the tests of the store migrate a real database",
}
"""Modules that need no test file of their own, and why."""

CORE = (
    "algorithms/*.py",
    "breaker.py",
    "buckets/*.py",
    "clock.py",
    "errors.py",
    "limiter.py",
    "model.py",
    "rules/book.py",
    "rules/validation.py",
    "services/convert.py",
    "services/status.py",
    "settings.py",
    "stats.py",
)
"""Modules without I/O of their own: nothing excuses a line or a branch that their own tests do not reach."""


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coverage", action="store_true", help="measure the core modules, too")
    parser.add_argument("modules", nargs="*", help="measure only these (such as buckets/table.py)")
    arguments = parser.parse_args()
    problems = list(mirror_problems())
    if arguments.coverage or arguments.modules:
        problems += coverage_problems(arguments.modules or CORE)
    print(
        "\n".join(problems)
        or "layout: every module has its test file, and every test file its module"
    )
    return 1 if problems else 0


def mirror_problems() -> Iterator[str]:
    """Name every module without its test file, and every test file without its module."""
    for module in sorted(SOURCE.rglob("*.py")):
        test = test_of(module)
        if not is_exempt(module) and has_behaviour(module) and not test.exists():
            yield f"{module.relative_to(ROOT)}: has no {test.relative_to(ROOT)}"
    modules = {test_of(module) for module in SOURCE.rglob("*.py")}
    for test in sorted(UNIT_TESTS.rglob("test_*.py")):
        if test not in modules:
            yield f"{test.relative_to(ROOT)}: there is no such module in src/ratelimitd"


def test_of(module: Path) -> Path:
    """Return the path of the one test file that belongs to a module; that of a package is test_init.py."""
    return UNIT_TESTS / module.relative_to(SOURCE).with_name(f"test_{module.stem.strip('_')}.py")


def is_exempt(module: Path) -> bool:
    """Tell whether a module is on the list of exemptions."""
    return any(module in SOURCE.glob(pattern) for pattern in EXEMPT)


def has_behaviour(module: Path) -> bool:
    """Tell whether a module holds a function that does something: constants, types and protocols need no test."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return any(
        not all(map(is_stub, node.body if isinstance(node.body, list) else [node.body]))
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, functions)
    )


def is_stub(statement: ast.AST) -> bool:
    """Tell whether a statement is only a docstring or `...`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def coverage_problems(patterns: list[str] | tuple[str, ...]) -> list[str]:
    """Measure each module that matches, and return what its own tests do not reach."""
    modules = [
        module
        for pattern in patterns
        for module in sorted(SOURCE.glob(pattern))
        if has_behaviour(module) and test_of(module).exists()
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(measure, modules))
    print(f"coverage: {len(modules)} core modules, each by its own tests alone")
    return [problem for problem in results if problem]


def measure(module: Path) -> str:
    """Run a module's test file alone; return what is missing, empty when nothing is."""
    name = str(module.relative_to(ROOT))
    test = test_of(module).relative_to(ROOT)
    with tempfile.TemporaryDirectory() as directory:
        data, report = Path(directory) / "data", Path(directory) / "report.json"
        coverage = [sys.executable, "-m", "coverage"]
        # A fixed order and a fixed seed: what hypothesis happens to try must not decide whether a branch is reached.
        pytest = [
            "pytest",
            "-q",
            "-p",
            "no:randomly",
            "--hypothesis-seed=0",
            "-m",
            "not system and not long",
        ]
        measured = [f"--data-file={data}", "--branch", f"--include={name}"]
        tests = run([*coverage, "run", *measured, "-m", *pytest, str(test)])
        if tests.returncode:
            return f"{name}: {test} fails when it is run alone:\n{tests.stdout}{tests.stderr}"
        read = run([*coverage, "json", f"--data-file={data}", "-o", str(report)])
        if read.returncode:
            return f"{name}: {test} never runs it"
        return missing(name, json.loads(report.read_text(encoding="utf-8"))["files"][name])


def missing(name: str, report: dict[str, Any]) -> str:
    """Say in one line what a coverage report of one file lacks."""
    lines = ", ".join(str(line) for line in report["missing_lines"])
    branches = ", ".join(
        f"{start}→{end if end > 0 else 'exit'}" for start, end in report["missing_branches"]
    )
    parts = [
        f"{what} {where}" for what, where in (("lines", lines), ("branches", branches)) if where
    ]
    return f"{name}: its own tests do not reach {'; '.join(parts)}" if parts else ""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository and keep what it says."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    raise SystemExit(main())
