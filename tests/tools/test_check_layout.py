import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_layout

CODE = "def double(value):\n    return value * 2 if value else 0\n"


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(check_layout, "ROOT", tmp_path)
    monkeypatch.setattr(check_layout, "SOURCE", tmp_path / "src" / "ratelimitd")
    monkeypatch.setattr(check_layout, "UNIT_TESTS", tmp_path / "tests" / "unit")
    return tmp_path


def problems():
    return list(check_layout.mirror_problems())


def coverage_problems(repository, pattern):
    """What the check says, in an interpreter of its own.

    It forks, and a fork of a process with threads, such as the one that runs these tests, may wait for one for ever.
    """
    script = f"""
import json
from pathlib import Path
from tools import check_layout
check_layout.ROOT = Path({str(repository)!r})
check_layout.SOURCE = check_layout.ROOT / "src" / "ratelimitd"
check_layout.UNIT_TESTS = check_layout.ROOT / "tests" / "unit"
print(json.dumps(check_layout.coverage_problems([{pattern!r}])))
"""
    project = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=project, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def put(repository, name, text=""):
    path = repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_module_and_test_file_answer_each_other(repository):
    put(repository, "src/ratelimitd/rules/book.py", CODE)
    put(repository, "tests/unit/rules/test_book.py")
    assert problems() == []


def test_module_without_test_file_is_named(repository):
    put(repository, "src/ratelimitd/rules/book.py", CODE)
    put(repository, "tests/unit/test_book.py")
    assert problems() == [
        "src/ratelimitd/rules/book.py: has no tests/unit/rules/test_book.py",
        "tests/unit/test_book.py: there is no such module in src/ratelimitd",
    ]


def test_package_with_functions_is_tested_in_test_init(repository):
    put(repository, "src/ratelimitd/cli/__init__.py", CODE)
    assert problems() == ["src/ratelimitd/cli/__init__.py: has no tests/unit/cli/test_init.py"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('"""Only a docstring."""\n', id="docstring"),
        pytest.param("LIMIT = 3\n", id="constant"),
        pytest.param("class Store:\n    def get(self):\n        '''Return it.'''\n", id="protocol"),
        pytest.param("class Store:\n    async def get(self): ...\n", id="ellipsis"),
    ],
)
def test_module_that_does_nothing_needs_no_test_file(repository, text):
    put(repository, "src/ratelimitd/store.py", text)
    assert problems() == []


def test_module_that_does_nothing_may_have_a_test_file(repository):
    put(repository, "src/ratelimitd/store.py", "LIMIT = 3\n")
    put(repository, "tests/unit/test_store.py")
    assert problems() == []


def test_migrations_and_main_modules_are_exempt(repository):
    put(repository, "src/ratelimitd/__main__.py", CODE)
    put(repository, "src/ratelimitd/rules/migrations/versions/0001_first.py", CODE)
    assert problems() == []


def test_module_reached_in_full_by_its_own_tests_passes(repository):
    put(repository, "src/ratelimitd/clock.py", CODE)
    put(repository, "tests/unit/test_clock.py", own_tests(0, 1))
    assert coverage_problems(repository, "clock.py") == []


def test_branch_that_only_other_tests_reach_is_reported(repository):
    put(
        repository,
        "src/ratelimitd/clock.py",
        "def sign(n):\n    if n:\n        n = 1\n    return n\n",
    )
    put(repository, "tests/unit/test_clock.py", own_tests(1, function="sign"))
    put(repository, "tests/unit/test_other.py", own_tests(0, function="sign"))
    assert coverage_problems(repository, "clock.py") == [
        "src/ratelimitd/clock.py: its own tests do not reach branches 2→4"
    ]


def test_failing_test_file_is_reported_with_its_output(repository):
    put(repository, "src/ratelimitd/clock.py", CODE)
    put(
        repository, "tests/unit/test_clock.py", "def test_it():\n    raise RuntimeError('broken')\n"
    )
    (problem,) = coverage_problems(repository, "clock.py")
    assert "fails when it is run alone" in problem
    assert "broken" in problem


def own_tests(*values, function="double"):
    calls = "\n".join(f"    clock.{function}({value})" for value in values)
    return (
        f"import sys\nsys.path.insert(0, 'src/ratelimitd')\nimport clock\ndef test_it():\n{calls}\n"
    )
