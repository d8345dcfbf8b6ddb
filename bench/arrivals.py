"""Random arrivals, generated in another process so that delays in the callers' loop do not delay them.

``python -m bench.arrivals PER_SECOND SECONDS`` writes each due time when it is due, as a double, on the monotonic clock
that all processes share.
"""

import os
import random
import struct
import sys
import time

DUE = struct.Struct("=d")


def main() -> None:
    """Write the due times to stdout."""
    per_second, seconds = float(sys.argv[1]), float(sys.argv[2])
    source = random.Random(1)
    due_s = time.monotonic()
    end_s = due_s + seconds
    while due_s < end_s:
        came = b""
        while due_s <= time.monotonic() and due_s < end_s:
            came += DUE.pack(due_s)
            due_s += source.expovariate(per_second)
        if came:
            os.write(1, came)
        time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    main()
