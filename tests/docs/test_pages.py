"""What the pages say about the code is still so: links, settings, metrics, citations, snippets."""

import ast
import re
import sqlite3
from pathlib import Path

import pytest

from ratelimitd.observe.metrics import DEFINITIONS
from ratelimitd.rules.store import RuleDraft
from ratelimitd.settings.sources import COMMAND_VARIABLES
from ratelimitd.settings.table import SETTINGS
from ratelimitd.workers.metrics import OF_PARENT
from tests.rule_stores import sqlite_store

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("clients/python/*.md")],
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows_of(page_text, heading):
    """The cells of the first table below a heading, without its head."""
    section = page_text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def cited_in_sources(pattern):
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("clients/**/*.py")]
    return {
        name for file in files for name in re.findall(pattern, file.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_decision_that_code_cites_has_a_page():
    numbers = {page.name[:4] for page in ROOT.glob("docs/adr/[0-9]*.md")}
    assert cited_in_sources(r"ADR (\d{4})") <= numbers


def test_every_decision_is_in_the_index_under_its_own_title():
    index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/adr/[0-9]*.md"):
        number, title = page.read_text(encoding="utf-8").splitlines()[0][2:].split(" – ", 1)
        assert page.name.startswith(number)
        assert title in index


def test_every_invariant_that_code_cites_is_in_the_architecture():
    rows = rows_of((ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8"), "Invariants")
    listed = {name for row in rows for name in row[0].split(", ")}
    assert cited_in_sources(r"\((I\d{1,2})\)") <= listed


def test_operations_lists_every_setting_with_its_default():
    table = {}
    for names, default, _ in rows_of(OPERATIONS, "Settings"):
        table |= dict.fromkeys(names.replace("*", "").split(", "), default)
    for setting in SETTINGS:
        # Not a constant, and said so in the help: made from the host and the process.
        expected = "host:pid" if setting.name == "NODE_ID" else setting.default
        assert table.pop(setting.name, "no row in the table") == expected, setting.name
    assert not table


def test_operations_names_no_metric_that_is_not_exported():
    named = set(re.findall(r"rate_limiter_\w+", OPERATIONS))
    assert named
    assert named <= {definition.name for definition in (*DEFINITIONS, *OF_PARENT)}


def test_operations_lists_every_variable_of_the_command_line():
    section = OPERATIONS.split("\n## Command line\n", 1)[1].split("\n## ", 1)[0]
    assert set(re.findall(r"RATELIMITD_(\w+)", section)) == set(COMMAND_VARIABLES)


async def test_the_queries_for_the_audit_trail_read_it(tmp_path):
    query, of_set = re.findall(r'ratelimitd\.db "(SELECT .+)"$', OPERATIONS, re.MULTILINE)
    async with sqlite_store(tmp_path) as store:
        rule = await store.create(RuleDraft("/a", "user", 1, 60, "token_bucket"), "admin@127.0.0.1")
        await store.delete(rule.id, "", "ops.example")
        rules = [RuleDraft("/b", "user", 1, 60, "token_bucket")]
        await store.apply(rules, "me", prune=False, dry_run=False, since=0)
    [file] = tmp_path.glob("*.db")
    connection = sqlite3.connect(file)
    rows = connection.execute(query).fetchall()
    [changed] = connection.execute(of_set.replace("17", "3")).fetchall()
    connection.close()
    assert changed[0] == "create"
    assert [(row[0], *row[2:5]) for row in rows] == [
        (3, "me", "apply", None),
        (2, "ops.example", "delete", "/a"),
        (1, "admin@127.0.0.1", "create", "/a"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_a_page_is_python(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(code)


def test_architecture_names_every_module_and_package_of_the_server():
    tree = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8").split("```")[1]
    named = {word.rstrip("/") for line in tree.splitlines() for word in line.split()}
    source = ROOT / "src/ratelimitd"
    found = {path.name for path in source.glob("*.py")}
    found |= {path.parent.name for path in source.glob("*/__init__.py")}
    assert found - {"__init__.py"} <= named
