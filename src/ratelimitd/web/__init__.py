"""The HTTP side of a node: metrics, probes, and a page that says what this is."""
