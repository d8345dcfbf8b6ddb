"""Mutation testing: small faults are put into the code one at a time, and the tests have to notice each.

``python tools/mutants.py [--sample N] [--seed N] [--only TEXT]`` mutates a copy of ``src/``, runs the tests of the part
that a mutant is in, and lists the mutants that survive. A comment ``equivalent: `` with a reason, on a line or above
it, says that no mutant of the line can be noticed. Exits with 1 if a mutant survives without one.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
SERVER, CLIENT = "src/ratelimitd", "clients/python/src"
REDIS, WIRE = f"{SERVER}/cluster/redis", f"{CLIENT}/ratelimitd_wire"
WORKERS: Final = 2
TIMEOUT_S: Final = 300
"""Mutants that make the tests hang count as killed."""

EXPLAINED: Final = "equivalent: "


class Part(NamedTuple):
    """Code, and the tests that must kill its mutants: the fast ones first, then the others."""

    paths: tuple[str, ...]
    tests: tuple[str, ...]
    more: tuple[str, ...] = ()


SCRIPTS: Final = (
    "tests/conformance/test_store_scripts.py",
    "tests/property/test_scripts_against_the_ledger.py",
    "tests/property/test_strict_checks_on_several_buckets.py",
    "tests/property/test_hold_scripts_against_the_model.py",
)

PARTS: Final = {
    "algorithms": Part(
        (f"{SERVER}/algorithms",),
        ("tests/unit/algorithms",),
        ("tests/property/test_algorithms_against_fractions.py", "tests/unit/ledger",
         "tests/conformance/test_vectors.py"),
    ),
    "ledger": Part(
        (f"{SERVER}/ledger",), ("tests/unit/ledger",), ("tests/simulation", "tests/unit/cluster", *SCRIPTS)
    ),
    "limiter": Part(
        (f"{SERVER}/limiter", f"{SERVER}/clock.py"),
        ("tests/unit/limiter", "tests/unit/test_timestamps.py", "tests/unit/test_clock.py"),
        ("tests/property/test_limiter_model.py", "tests/unit/cluster", "tests/unit/services"),
    ),
    "scripts": Part((f"{REDIS}/scripts",), SCRIPTS, ("tests/unit/cluster",)),
    "buckets": Part((f"{SERVER}/buckets",), ("tests/unit/buckets",), ("tests/property/test_restart_model.py",)),
    "breaker": Part(
        (f"{WIRE}/breaker.py",), ("tests/unit/wire", "tests/unit/cluster"), ("tests/client",)
    ),
    "store": Part(
        (f"{REDIS}/codec.py", f"{REDIS}/link.py", f"{REDIS}/connection.py"),
        ("tests/unit/cluster/redis",),
        SCRIPTS,
    ),
    "services": Part(
        (f"{SERVER}/services/wire.py", f"{SERVER}/services/wire_format.py", f"{SERVER}/services/bulk_checks.py",
         f"{SERVER}/services/guesses.py"),
        ("tests/unit/services",),
        ("tests/property/test_bulk_checks_against_the_general_way.py", "tests/rpc/test_checks.py"),
    ),
    "rules": Part(
        (f"{SERVER}/rules/validation.py", f"{SERVER}/rules/feed.py", f"{SERVER}/rules/sql/store.py"),
        ("tests/unit/rules",),
        ("tests/conformance/test_rule_store.py",),
    ),
    "http2": Part(
        (f"{SERVER}/http2", f"{WIRE}/huffman.py", f"{WIRE}/frames.py"),
        ("tests/unit/http2", "tests/unit/wire"),
        ("tests/conformance/test_http2_rules.py", "tests/property/test_hpack.py", "tests/property/test_http2_bytes.py",
         "tests/property/test_http2_conversations.py", "tests/unit/rpc"),
    ),
    "client": Part(
        (f"{CLIENT}/ratelimitd_client/batching.py", f"{CLIENT}/ratelimitd_client/fail_open.py"), ("tests/client",)
    ),
}  # fmt: skip


class Mutant(NamedTuple):
    """One fault: a replacement for the text between two offsets of a file."""

    part: str
    path: str
    line: int
    begin: int
    end: int
    text: str

    def shown(self, source: str) -> str:
        """Return the place, and the line before and after."""
        start = source.rfind("\n", 0, self.begin) + 1
        stop = (source + "\n").index("\n", self.end)
        mutated = source[start : self.begin] + self.text + source[self.end : stop]
        return (
            f"{self.path}:{self.line}\n    - {source[start:stop].strip()}\n    + {mutated.strip()}"
        )


COMPARED: Final = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED: Final = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "//", ast.Div: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "&", ast.Pow: "*",
}  # fmt: skip


class Finder(ast.NodeVisitor):
    """Finds the mutants of a Python module, except those of annotations, texts, asserts and log lines."""

    def __init__(self, part: str, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._part, self._path, self._source = part, path, source
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._octets = source.encode()

    def _offset(self, line: int, column: int) -> int:
        return len(self._octets[: self._starts[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or 0, node.end_col_offset or 0
        return self._offset(node.lineno, node.col_offset), self._offset(end_line, end_column)

    def _replace(self, line: int, span: tuple[int, int], text: str) -> None:
        self.found.append(Mutant(self._part, self._path, line, *span, text))

    def _between(self, left: ast.expr, right: ast.expr, text: str) -> None:
        """Replace the operator between two operands; keep parentheses and spaces."""
        begin, end = self._span(left)[1], self._span(right)[0]
        operator = re.search(r"[^\s()\\]+(?:\s+(?:not|in)\b)?", self._source[begin:end])
        if operator is not None and "#" not in self._source[begin:end]:
            span = begin + operator.start(), begin + operator.end()
            self._replace(right.lineno, span, text)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Flip comparisons."""
        for left, operator, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            self._between(left, right, COMPARED[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Change arithmetic, except unions of types or sets."""
        if type(node.op) in COMPUTED:
            self._between(node.left, node.right, COMPUTED[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Swap ``and`` and ``or``."""
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, "or" if isinstance(node.op, ast.And) else "and")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Remove ``not`` and ``-``."""
        begin, _ = self._span(node)
        end = begin + (3 if isinstance(node.op, ast.Not) else 1)
        self._replace(node.lineno, (begin, end), "")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Change ``+=`` and other augmented assignments."""
        if type(node.op) in COMPUTED:
            self._between(node.target, node.value, COMPUTED[type(node.op)] + "=")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change numbers and booleans."""
        if isinstance(node.value, bool):
            self._replace(node.lineno, self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node.lineno, self._span(node), str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """Swap ``min`` and ``max``. ``strict`` of zip() is an assert, ``slots`` of dataclass() saves memory."""
        kept = [keyword for keyword in node.keywords if keyword.arg not in {"strict", "slots"}]
        node.keywords = kept
        if isinstance(node.func, ast.Name) and node.func.id in {"min", "max"}:
            self._replace(
                node.lineno, self._span(node.func), "max" if node.func.id == "min" else "min"
            )
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Negate conditions, except those for type checkers."""
        if ast.unparse(node.test) != "TYPE_CHECKING":
            begin, end = self._span(node.test)
            self._replace(node.test.lineno, (begin, end), f"not ({self._source[begin:end]})")
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove calls whose result is unused, except log lines."""
        if isinstance(node.value, ast.Call) and not ast.unparse(node.value).startswith("_log."):
            self._replace(node.lineno, self._span(node), "pass")
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value only."""
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit the body and the defaults."""
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 -- the name that ast asks for

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip asserts: they state invariants."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip the texts of errors."""


LUA: Final = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "~=", "~=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "%": "+", "and": "or", "or": "and", "true": "false", "false": "true", "not": "",
}  # fmt: skip
_LUA_TOKEN: Final = re.compile(
    r"--[^\n]*|'[^'\n]*'|<=|>=|==|~=|\.\.|[<>+\-*/%]|\b(?:and|or|not|true|false|\d+)\b"
)


def lua_mutants(part: str, path: str, source: str) -> Iterator[Mutant]:
    """Find the mutants of a script."""
    for token in _LUA_TOKEN.finditer(source):
        text = token.group()
        other = str(int(text) + 1) if text.isdigit() else LUA.get(text)
        if other is not None:
            yield Mutant(part, path, source.count("\n", 0, token.start()) + 1, *token.span(), other)


def mutants_of(part: str) -> Iterator[Mutant]:
    """Find all mutants of a part, except on lines marked as equivalent."""
    for name in PARTS[part].paths:
        top = ROOT / name
        files = [top] if top.is_file() else sorted([*top.rglob("*.py"), *top.rglob("*.lua")])
        for file in files:
            source, path = file.read_text(encoding="utf-8"), str(file.relative_to(ROOT))
            lines = source.splitlines()
            if file.suffix == ".lua":
                found = list(lua_mutants(part, path, source))
            else:
                finder = Finder(part, path, source)
                finder.visit(ast.parse(source))
                found = finder.found
            for mutant in found:
                above = lines[mutant.line - 2].strip() if mutant.line > 1 else ""
                comments = (lines[mutant.line - 1], above if above[:1] in "#-" else "")
                if not any(EXPLAINED in comment for comment in comments):
                    yield mutant


class Copy:
    """A copy of the code that tests import instead of the original."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in ("src", "clients/python/src"):
            shutil.copytree(
                ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__")
            )

    def survives(self, mutant: Mutant) -> bool:
        """Return whether no test kills a mutant."""
        file = self._directory / mutant.path
        source = file.read_text(encoding="utf-8")
        file.write_text(
            source[: mutant.begin] + mutant.text + source[mutant.end :], encoding="utf-8"
        )
        part = PARTS[mutant.part]
        try:
            return all(self.passes(tests) for tests in (part.tests, part.more) if tests)
        finally:
            file.write_text(source, encoding="utf-8")

    def passes(self, tests: Sequence[str]) -> bool:
        """Return whether the tests pass with the current copy."""
        command = [
            sys.executable,
            "-B",
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        path = os.pathsep.join(
            str(self._directory / name) for name in ("src", "clients/python/src")
        )
        with subprocess.Popen(
            [*command, "-m", "not long and not system", *tests],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "HYPOTHESIS_STORAGE_DIRECTORY": str(self._directory / "examples"),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(TIMEOUT_S) == 0
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return False


def main() -> int:
    """Test a sample of mutants; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample", type=int, default=800, help="how many mutants, over all parts (800)"
    )
    parser.add_argument("--seed", type=int, default=1, help="which (1)")
    parser.add_argument("--only", default="", help="only mutants whose path contains this")
    chosen = parser.parse_args()
    found = [mutant for part in PARTS for mutant in mutants_of(part) if chosen.only in mutant.path]
    source = random.Random(chosen.seed)  # noqa: S311 -- no secret comes of it
    sample = source.sample(found, min(chosen.sample, len(found)))
    print(f"{len(sample)} of {len(found)} mutants", flush=True)
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory() as directory:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(WORKERS):
            copies.put(Copy(Path(directory, str(number))))

        # Tests that fail without a mutant would kill every mutant.
        parts = [PARTS[mutant.part] for mutant in sample]
        tests = {tests for part in parts for tests in (part.tests, part.more) if tests}
        if not all(map(Copy(Path(directory, "whole")).passes, tests)):
            print("the tests fail without a mutant")
            return 1

        def attempt(mutant: Mutant) -> None:
            copy = copies.get()
            try:
                if copy.survives(mutant):
                    survivors.append(mutant)
                    print(
                        mutant.shown((ROOT / mutant.path).read_text(encoding="utf-8")), flush=True
                    )
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(attempt, sample))
    tried, alive = Counter(one.part for one in sample), Counter(one.part for one in survivors)
    for part in tried:
        print(f"{part:12} {alive[part]:4} of {tried[part]:4} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
