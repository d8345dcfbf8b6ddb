"""No module of the packages imports itself through others while it is loaded."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "ratelimitd": ROOT / "src",
    "ratelimitd_client": ROOT / "clients/python/src",
    "ratelimitd_wire": ROOT / "clients/python/src",
}


def modules_of(package):
    """The syntax tree of each module, by its name."""
    source = PACKAGES[package]
    for path in (source / package).rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports_of(trees):
    """What each module imports at its top: neither in a function, nor for types only."""
    return {
        name: {
            found
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            for found in (f"{node.module}.{alias.name}", node.module)
            if found in trees and found != name
        }
        for name, tree in trees.items()
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_no_import_circle(package):
    graph = imports_of(dict(modules_of(package)))
    # A module is loaded after its package, which may import it for its public names.
    for name, imported in graph.items():
        graph[name] = {one for one in imported if not name.startswith(f"{one}.")}
    assert len(graph) > 1
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_a_circle_is_found():
    trees = {
        "p": ast.parse(""),
        "p.a": ast.parse("from p.b import x"),
        "p.b": ast.parse("from p import a"),
    }
    with pytest.raises(ValueError, match="cycle"):
        TopologicalSorter(imports_of(trees)).prepare()
