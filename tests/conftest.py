"""What holds for every test."""

import logging

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep asyncio's remark about a slow turn of a busy machine out of tests that count what ratelimitd logs."""
    logging.getLogger("asyncio").addFilter(_is_no_remark_on_speed)


def _is_no_remark_on_speed(record: logging.LogRecord) -> bool:
    return not (record.levelno == logging.WARNING and str(record.msg).startswith("Executing"))
