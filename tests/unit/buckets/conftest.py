from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture
def open_files(tmp_path):
    """Count the files below the test's directory that are open; other tests' garbage closes files at any time."""

    def count():
        found = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed since
                found += file.readlink().is_relative_to(tmp_path)
        return found

    return count
