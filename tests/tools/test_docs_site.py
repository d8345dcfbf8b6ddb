import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[2] / "tools" / "docs_site.py"

FILES = {
    "mkdocs.yml": f"site_name: test\nhooks: [{HOOK}]\ntheme: {{name: mkdocs}}\nplugins: []\n",
    "docs/index.md": "[rules](../deploy/alerts.yml), [again](../deploy/alerts.yml), [down](adr/1.md)",
    "docs/adr/1.md": "[how](../../SECURITY.md#reporting), [up](../index.md)",
    "deploy/alerts.yml": "groups: []\n",
    "SECURITY.md": "# Security\n",
}


def build(root, files, *options):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    return subprocess.run(
        [mkdocs, "build", "--strict", *options],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("site").resolve()
    run = build(root, FILES, "--quiet")
    assert run.returncode == 0, run.stderr
    return root / "site"


def test_a_file_outside_the_pages_becomes_one_of_the_site(site):
    assert (site / "source/deploy/alerts.yml").read_text(encoding="utf-8") == "groups: []\n"
    assert (site / "index.html").read_text(encoding="utf-8").count(
        '"source/deploy/alerts.yml"'
    ) == 2


def test_a_page_further_down_finds_it_too_and_a_text_stays_a_text(site):
    assert 'href="../../source/SECURITY.md.txt"' in (site / "adr/1/index.html").read_text("utf-8")
    assert (site / "source/SECURITY.md.txt").read_text(encoding="utf-8") == "# Security\n"


def test_links_between_pages_stay_what_they_are(site):
    assert 'href="adr/1/"' in (site / "index.html").read_text(encoding="utf-8")


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path):
    root = tmp_path.resolve()
    run = build(root, FILES | {"docs/index.md": "[gone](../deploy/nothing.yml)"})
    assert run.returncode == 1
    assert "nothing.yml" in run.stdout + run.stderr
