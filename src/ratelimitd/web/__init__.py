"""The HTTP side of a node: metrics, probes, the operator pages and the services over HTTP."""
