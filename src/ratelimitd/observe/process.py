"""What the operating system says about this process: its memory and when it started."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Final

STATM: Final = Path("/proc/self/statm")

STARTED_AT_S: Final = time.time()
"""Unix seconds at which this module was first imported, which is while the process starts."""

_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024


def resident_bytes(statm: Path = STATM) -> int:
    """Resident memory of this process in bytes: of now on Linux, elsewhere the largest it has been."""
    try:
        return int(statm.read_bytes().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
