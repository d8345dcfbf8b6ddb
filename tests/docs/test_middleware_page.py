"""What the page on middleware says of options is so, and its example of a test passes."""

import dataclasses
import re
from pathlib import Path

from ratelimitd_client.middleware import Options

PAGE = (Path(__file__).resolve().parents[2] / "docs/middleware.md").read_text(encoding="utf-8")


def test_it_lists_every_option_with_its_default():
    section = PAGE.split("\n## Options\n", 1)[1].split("\n## ", 1)[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))
    assert listed == {field.name: repr(field.default) for field in dataclasses.fields(Options)}


async def test_its_example_of_a_test_passes():
    [code] = re.findall(r"```python\n(import httpx\n.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(code, names)  # noqa: S102 - our own
    await names["test_the_second_order_in_a_minute_is_too_many"]()
