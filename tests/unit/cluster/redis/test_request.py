import asyncio

from ratelimitd.cluster.redis.connection import Request, pack


def test_a_command_is_packed_in_resp():
    assert pack((b"SET", "k", 12)) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n12\r\n"


def test_done_is_called_once():
    told = []
    request = Request(b"", told.append)
    request.resolve(1)
    request.resolve(2)
    assert told == [1]
    assert request.done is None


async def test_a_failing_callback_is_reported_and_affects_no_other():
    reported = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["exception"])
    )
    error = ValueError("defect")

    def fails(_reply):
        raise error

    Request(b"", fails).resolve(1)
    assert reported == [error]
