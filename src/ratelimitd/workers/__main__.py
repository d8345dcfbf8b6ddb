"""A worker, started by its parent: ``python -m ratelimitd.workers``."""

import sys

from ratelimitd.workers.worker import main

sys.exit(main())
