"""The composition root: builds a node from its parts and runs it as a process."""
