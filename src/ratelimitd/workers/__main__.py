"""A worker, started by its parent: ``python -m ratelimitd.workers``, which nobody else has a reason to do."""

import sys

from ratelimitd.workers.worker import main

sys.exit(main())
