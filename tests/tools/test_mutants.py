"""The runner of mutants: which faults it makes, and that it tells those that tests notice from the others."""

import ast

import pytest

from tools import mutants
from tools.mutants import Copy, Finder, Part, lua_mutants, mutants_of


def made(source):
    """The lines that a module becomes."""
    finder = Finder("part", "module.py", source)
    finder.visit(ast.parse(source))
    texts = [source[: one.begin] + one.text + source[one.end :] for one in finder.found]
    for text in texts:
        ast.parse(text)
    return texts


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b < c", ["a = b <= c"]),
        ("a = b is not None", ["a = b is None"]),
        ("a = b + 1", ["a = b - 1", "a = b + 2"]),
        ("a = -b", ["a = b"]),
        ("a = (b) // (c)", ["a = (b) * (c)"]),
        ("a = b and c", ["a = b or c"]),
        ("a = not b", ["a =  b"]),
        ("a = min(b, c)", ["a = max(b, c)"]),
        ("a += True", ["a -= True", "a += False"]),
        ("a: int = 1", ["a: int = 2"]),
        ("f(a)", ["pass"]),
        ("if a:\n    b", ["if not (a):\n    b"]),
        ("ü = 'ü' + a", ["ü = 'ü' - a"]),
    ],
)
def test_a_module_has_a_mutant_for_each_fault(source, expected):
    assert sorted(made(source)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        "assert a < 1",
        "_log.warning('a', 1)",
        "def f(a: int | None) -> 'x': pass",
        "raise E(1)",
        "'a < b'",
    ],
)
def test_what_is_no_behaviour_has_none(source):
    assert made(source) == []


def test_a_script_has_mutants_outside_of_comments_and_texts():
    source = "if a < 1 and not b then -- a < b\n  call('a < b') end"
    found = [
        source[: one.begin] + one.text + source[one.end :]
        for one in lua_mutants("p", "s.lua", source)
    ]
    first = [text.partition(" --")[0] for text in found]
    assert first == [
        "if a <= 1 and not b then",
        "if a < 2 and not b then",
        "if a < 1 or not b then",
        "if a < 1 and  b then",
    ]


@pytest.mark.deep
def test_the_tests_of_a_part_tell_mutants_that_matter_from_others(tmp_path, monkeypatch):
    path = "src/ratelimitd/retry.py"
    for tests, expected in (
        ("tests/unit/test_backoff.py", False),
        ("tests/unit/test_errors.py", True),
    ):
        monkeypatch.setitem(mutants.PARTS, "retry", Part((path,), (tests,)))
        first = next(mutants_of("retry"))
        assert Copy(tmp_path / tests).survives(first) is expected
        assert "retry.py:" in first.shown((mutants.ROOT / path).read_text())


def test_a_line_that_explains_itself_has_no_mutants(tmp_path, monkeypatch):
    file = tmp_path / "module.py"
    file.write_text(
        "a = b < c  # equivalent: they are never equal\nd = 1\n# equivalent: e is read nowhere\ne = 2\n"
    )
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setitem(mutants.PARTS, "part", Part(("module.py",), ()))
    assert [one.line for one in mutants_of("part")] == [2]


def test_what_a_part_names_is_there():
    for part in mutants.PARTS.values():
        named = (*part.paths, *part.tests, *part.more)
        assert [name for name in named if not (mutants.ROOT / name).exists()] == []
