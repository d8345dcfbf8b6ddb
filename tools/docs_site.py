"""A hook of the documentation site: copies files outside docs/ that pages link to into the site.

In the repository, the same links lead to the files themselves.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)]*)?\)")
FOLDER = "source"


def on_page_markdown(markdown: str, /, *, page: Page, config: Any, files: Files) -> str:
    """Point links outside docs/ to copies of their targets."""
    docs, root = Path(config.docs_dir), Path(config.config_file_path).parent
    folder = (docs / page.file.src_uri).parent

    def kept(found: re.Match[str]) -> str:
        target = (folder / found["path"]).resolve()
        if target.is_relative_to(docs) or not target.is_file():
            return found[0]  # the builder reports a broken link
        uri = f"{FOLDER}/{target.relative_to(root)}"
        if target.suffix == ".md":
            uri += ".txt"  # served as text, not as a page
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=target.read_bytes()))
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{uri})"

    return LINK.sub(kept, markdown)
