"""The revisions, each a file that is never changed once released."""
