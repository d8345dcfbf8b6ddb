"""What a node tells about itself: metrics, health and logs. Reads counters; the check path never waits for it."""
