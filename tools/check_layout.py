"""Check that tests/unit mirrors src/ratelimitd, and (`--coverage`) that each core module is covered by its own tests.

Coverage of a whole test run says little: a module can be green because its callers happen to pass through it. So each
module of the core is measured alone, by its own test file alone, and must reach every line and every branch. The idea
is that of the websockets project.
"""

import argparse
import ast
import contextlib
import io
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import coverage
import hypothesis  # noqa: F401 - so that a forked process need not import it, see in_processes
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ratelimitd"
UNIT_TESTS = ROOT / "tests" / "unit"
CONFIG = ROOT / "pyproject.toml"

PYTEST_OPTIONS = (
    "--quiet",
    "-mnot system and not long",
    # A fixed order and a fixed seed: what hypothesis happens to try must not decide whether a branch is reached.
    "-pno:randomly",
    "--hypothesis-seed=0",
    # The plugins are imported before pytest could rewrite their assertions; they are not what is tested.
    "-Wignore::pytest.PytestAssertRewriteWarning",
)

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
    "cluster/*.py",
    "errors.py",
    "http2/*.py",
    "http2/hpack/*.py",
    "ledger/*.py",
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


def coverage_problems(patterns: Iterable[str]) -> list[str]:
    """Measure each module that matches, and return what its own tests do not reach."""
    modules = [
        module
        for pattern in patterns
        for module in sorted(SOURCE.glob(pattern))
        if has_behaviour(module) and test_of(module).exists()
    ]
    problems = [problem for problem in in_processes(measure, modules) if problem]
    print(f"coverage: measured {len(modules)} core modules, each by its own tests alone")
    return problems


def in_processes(function: Callable[[Path], str], modules: list[Path]) -> Iterator[str]:
    """Call the function for each module in a process of its own, as many at a time as there are processors.

    A forked process has pytest and its plugins already, so it need not import them under the eyes of coverage, which
    takes longer than most tests do.
    """
    fork = multiprocessing.get_context("fork")
    waiting, answers = list(reversed(modules)), set[Connection]()
    while waiting or answers:
        while waiting and len(answers) < (os.cpu_count() or 1):
            answer, sender = fork.Pipe(duplex=False)
            module = waiting.pop()
            fork.Process(target=lambda to, of: to.send(function(of)), args=(sender, module)).start()
            sender.close()
            answers.add(answer)
        for answer in cast("list[Connection]", wait(list(answers))):
            answers.remove(answer)
            yield answer.recv()


def measure(module: Path) -> str:
    """Run a module's test file alone; return what is missing, empty when nothing is."""
    name, test = str(module.relative_to(ROOT)), str(test_of(module).relative_to(ROOT))
    measured = coverage.Coverage(data_file=None, config_file=str(CONFIG), include=[str(module)])
    os.chdir(ROOT)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        with measured.collect():
            status = pytest.main([*PYTEST_OPTIONS, test])
        if status != pytest.ExitCode.OK:
            return f"{name}: {test} fails when it is run alone:\n{output.getvalue()}"
        with tempfile.NamedTemporaryFile() as report:
            measured.json_report(outfile=report.name)
            files = json.load(report)["files"]
    return missing(name, files[name]) if name in files else f"{name}: {test} never imports it"


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


if __name__ == "__main__":
    raise SystemExit(main())
