"""The settings of a node: the table of them, their values, and where values come from."""
