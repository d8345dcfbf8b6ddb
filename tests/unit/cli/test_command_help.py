"""Help from docstrings."""

from ratelimitd.cli.options import VERBATIM, help_of


def documented():
    """Do it.

    A paragraph.

    Example:
      ratelimitd do
      ratelimitd do --twice
    """


def undocumented():
    pass


def test_only_the_example_keeps_its_lines():
    assert help_of(documented) == (
        f"Do it.\n\nA paragraph.\n\n{VERBATIM}Example:\n  ratelimitd do\n  ratelimitd do --twice"
    )


def test_a_command_without_a_docstring_has_no_help():
    assert help_of(undocumented) == ""
