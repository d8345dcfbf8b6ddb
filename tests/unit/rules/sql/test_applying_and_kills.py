"""A process killed while it applies a whole set of rules: the file holds all of the set or none of it."""

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest

from ratelimitd.rules.store import RuleDraft
from tests.rule_stores import sqlite_store

RULES = 500

CHILD = f"""
import asyncio, sys
from pathlib import Path
from sqlalchemy import Engine, event
from ratelimitd.rules.store import RuleDraft
from tests.rule_stores import sqlite_store

writes = int(sys.argv[2])

def stop_in_the_middle(connection, cursor, statement, *rest):
    global writes
    writes -= statement.startswith(("INSERT", "UPDATE", "DELETE"))
    if not writes:
        print("in the middle", flush=True)
        sys.stdin.read()

async def main():
    async with sqlite_store(Path(sys.argv[1])) as store:
        event.listen(Engine, "after_cursor_execute", stop_in_the_middle)
        drafts = [RuleDraft(f"/{{n}}", "user", 2, 60, "token_bucket") for n in range(1, {RULES})]
        await store.apply(drafts, "me", prune=True, dry_run=False, since=0)
        print("applied", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(("writes", "reached"), [(20, "in the middle"), (10**6, "applied")])
async def test_kill_leaves_all_or_none_of_a_set_applied(tmp_path, writes, reached):
    drafts = [RuleDraft(f"/{n}", "user", 1, 60, "token_bucket") for n in range(RULES - 1)]
    async with sqlite_store(tmp_path) as store:
        await store.apply(drafts, "me", prune=False, dry_run=False, since=0)
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(writes)]
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert child.stdout
    assert await child.stdout.readline() == f"{reached}\n".encode()
    child.kill()
    await child.wait()
    done = reached == "applied"
    async with sqlite_store(tmp_path) as store:
        rules = await store.page("", "", None, RULES)
        assert {rule.endpoint for rule in rules} == {f"/{n + done}" for n in range(RULES - 1)}
        assert {rule.limit for rule in rules} == {1 + done}
        assert await store.revision() == len(await store.audit("", None, 10)) == 1 + done
