"""Rules: what they are, where they are kept, and how the book of them stays current on a node."""
