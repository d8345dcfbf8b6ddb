"""What a new connection says first: who we are, which database, and whether the server may be written to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.sharedstate.connection import Connection
from ratelimitd.sharedstate.replies import code_of, login_error_of
from ratelimitd.sharedstate.request import Request, pack
from ratelimitd.sharedstate.url import Login


class Greeting(NamedTuple):
    """What is said on each new connection of a link."""

    login: Login = Login()
    database: int = 0
    client_name: str = ""
    """Shown by CLIENT LIST; no spaces."""
    wants_primary: bool = True
    """Refuse a replica. In Cluster a node redirects what is not its own, whatever its role."""


class Refused(Exception):  # noqa: N818 -- it carries an error reply and never leaves this package
    """The server answered with an error."""


async def ask(connection: Connection, *command: bytes | int | str) -> Any:
    """The reply to one command of a connection whose errors go to :func:`hand_over`.

    Raises:
        StoreUnavailableError: none came.
        Refused: it was an error, and its text is this exception's.
    """
    reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(value: object) -> None:
        if reply.done():
            return  # cancelled
        if isinstance(value, Exception):
            reply.set_exception(value)
        else:
            reply.set_result(value)

    connection.submit(Request(pack(command), done))
    return await reply


def hand_over(request: Request, text: str) -> None:
    """Give an error reply to whoever awaits :func:`ask`."""
    request.tell(Refused(text))


async def log_in(connection: Connection, greeting: Greeting) -> None:
    """Say everything in one round trip, then look at the replies.

    Raises:
        StoreMisconfiguredError: the server refuses the user, the password or the database.
        StoreUnavailableError: it cannot serve now, or is a replica.
    """
    login = greeting.login
    must: list[Sequence[bytes | int | str]] = []
    if login.password:
        names = (login.user,) if login.user else ()
        must.append((b"AUTH", *names, login.password))
    if greeting.database:
        must.append((b"SELECT", greeting.database))
    # A user may be forbidden these: then the node works all the same.
    may: list[Sequence[bytes | int | str]] = [(b"PING",)]
    if greeting.client_name:
        may.append((b"CLIENT", b"SETNAME", greeting.client_name))
    if greeting.wants_primary:
        may.append((b"ROLE",))
    asked = [ask(connection, *command) for command in (*must, *may)]
    replies = await asyncio.gather(*asked, return_exceptions=True)
    for place, reply in enumerate(replies):
        if isinstance(reply, Refused):
            if place < len(must) or code_of(str(reply)) != "NOPERM":
                raise login_error_of(str(reply)) from None
        elif isinstance(reply, BaseException):
            raise reply
    role = replies[-1] if greeting.wants_primary else None
    if isinstance(role, list) and role[:1] != [b"master"]:
        message = "the server is a replica"
        raise StoreUnavailableError(message)
