"""What is in ``deploy/`` is valid, complete, and agrees with the code."""
