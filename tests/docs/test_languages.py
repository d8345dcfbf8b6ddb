"""What the page on other languages shows is in the programs that the end-to-end tests run, line for line."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "languages.md").read_text(encoding="utf-8")
SOURCES = {
    "go": "go/limiter/limiter.go",
    "java": "java/src/main/java/com/example/app/Limiter.java",
    "js": "node/limiter.js",
    "rust": "rust/src/limiter.rs",
}


@pytest.mark.parametrize("language", SOURCES)
def test_every_line_that_the_page_shows_is_in_the_example(language):
    source = (ROOT / "examples" / "languages" / SOURCES[language]).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert blocks
    lines = {line.strip() for line in source.splitlines()}
    for block in blocks:
        assert {line.strip() for line in block.splitlines()} <= lines
