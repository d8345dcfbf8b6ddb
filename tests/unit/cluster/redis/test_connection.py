import asyncio

import pytest

from ratelimitd.cluster.redis.connection import (
    LATE_S,
    MAX_READ_PAUSES,
    MAX_REPLY_BYTES,
    READ_PAUSE_S,
    REQUEST_S,
    SILENCE_S,
    Connection,
    Request,
    again,
    pack,
)
from ratelimitd.errors import (
    StoreCorruptError,
    StoreOverloadedError,
    StoreSlowError,
    StoreUnavailableError,
)

TIMEOUT_S = 0.005
PING = pack((b"PING",))


class Transport:
    """The part of a transport that a connection uses."""

    def __init__(self):
        self.writes = []
        self.aborted = False

    def write(self, octets):
        self.writes.append(octets)

    def abort(self):
        self.aborted = True


class Setup:
    """A connection with a manual clock, and a record of its callbacks."""

    def __init__(self, **options):
        self.now_s = 100.0
        self.errors = []
        self.lost = []
        self.transport = Transport()
        self.connection = Connection(
            lambda request, text: self.errors.append((request, text)),
            self.lost.append,
            timeout_s=TIMEOUT_S,
            time_s=lambda: self.now_s,
            **options,
        )
        self.connection.connection_made(self.transport)

    def ask(self, packed=PING, **options):
        """Submit a request; return the list that receives its replies."""
        replies = []
        self.connection.submit(Request(packed, replies.append, **options))
        return replies

    async def asked(self, packed=PING, **options):
        """Submit a request and flush it."""
        replies = self.ask(packed, **options)
        await turn()
        return replies

    def timer(self, late_s=0.0):
        """Fire the timer, so much after its time."""
        self.now_s = self.connection._timer_due_s + late_s
        self.connection._timer.cancel()
        self.connection.look()


async def turn():
    for _ in range(3):
        await asyncio.sleep(0)


async def test_requests_of_one_iteration_are_sent_in_one_write():
    setup = Setup()
    for _ in range(3):
        setup.ask()
    assert setup.transport.writes == []
    await turn()
    assert setup.transport.writes == [3 * PING]
    await setup.asked()
    assert setup.transport.writes == [3 * PING, PING]


async def test_split_replies_are_matched_in_order():
    setup = Setup()
    first, second = setup.ask(), await setup.asked()
    for octet in b"$5\r\nfirst\r\n$6\r\ns":
        setup.connection.data_received(bytes([octet]))
    assert (first, second, setup.connection.in_flight) == ([b"first"], [], 1)
    setup.connection.data_received(b"econd\r\n")
    assert (second, setup.connection.in_flight) == ([b"second"], 0)


async def test_an_error_reply_is_passed_to_on_error_with_its_request():
    setup = Setup()
    replies = await setup.asked()
    setup.connection.data_received(b"-OOM no room\r\n")
    ((request, text),) = setup.errors
    assert (replies, text) == ([], "OOM no room")
    request.resolve("told by the owner")
    assert replies == ["told by the owner"]


async def test_a_request_that_times_out_fails_and_its_late_reply_is_dropped():
    setup = Setup()
    first = await setup.asked()
    setup.timer()
    [slow] = first
    assert isinstance(slow, StoreSlowError)
    second = await setup.asked()
    setup.connection.data_received(b"-OOM late\r\n+second\r\n")
    assert (len(first), second, setup.errors) == (1, [b"second"], [])


async def test_a_patient_request_gets_its_late_reply():
    setup = Setup()
    replies, usual = setup.ask(is_patient=True), await setup.asked()
    setup.timer()
    assert (replies, len(usual)) == ([], 1)
    setup.connection.data_received(b"+late\r\n+later\r\n")
    assert (replies, len(usual)) == ([b"late"], 1)


async def test_a_patient_request_fails_with_its_connection():
    setup = Setup()
    replies = await setup.asked(is_patient=True)
    setup.timer()
    setup.connection.drop(StoreUnavailableError("silent"))
    assert [type(reply) for reply in replies] == [StoreUnavailableError]


async def test_only_requests_past_their_deadline_fail():
    setup = Setup()
    first = await setup.asked()
    setup.now_s += TIMEOUT_S / 2
    second = await setup.asked()
    setup.timer()
    assert (len(first), len(second)) == (1, 0)
    setup.timer()
    assert (len(first), len(second)) == (1, 1)


async def test_the_timeout_grows_with_the_requests_ahead():
    setup = Setup()
    asked = [setup.ask() for _ in range(1_000)]
    await turn()
    assert setup.connection._timer_due_s == pytest.approx(100 + TIMEOUT_S + 0.05, abs=1e-9)
    setup.timer()
    assert {len(replies) for replies in asked} == {1}
    last = await setup.asked()
    assert setup.connection._timer_due_s == pytest.approx(
        setup.now_s + TIMEOUT_S + REQUEST_S, abs=1e-9
    ), "those that are told already are not waited for"
    setup.timer()
    assert len(last) == 1
    setup.connection.drop(StoreUnavailableError("end"))


async def test_answered_requests_do_not_time_out():
    setup = Setup()
    first, second, third = setup.ask(), setup.ask(), await setup.asked()
    setup.connection.data_received(b"+1\r\n")
    setup.timer()
    assert first == [b"1"]
    assert (len(second), len(third)) == (1, 1)
    setup.connection.data_received(b"+2\r\n+3\r\n")
    fourth = await setup.asked()
    setup.timer()
    assert (len(second), len(third), len(fourth)) == (1, 1, 1)


async def test_an_idle_connection_has_no_timer():
    setup = Setup()
    await setup.asked()
    setup.connection.data_received(b"+1\r\n")
    setup.timer()
    assert setup.connection._timer is None
    await setup.asked()
    assert setup.connection._timer is not None
    setup.connection.drop(StoreUnavailableError("end"))


async def test_a_new_request_replaces_a_later_timer():
    setup = Setup()
    await setup.asked()
    setup.timer()
    assert setup.connection._timer_due_s == pytest.approx(setup.now_s + SILENCE_S - TIMEOUT_S)
    replies = await setup.asked()
    assert setup.connection._timer_due_s == pytest.approx(setup.now_s + TIMEOUT_S)
    setup.timer()
    assert len(replies) == 1
    setup.connection.drop(StoreUnavailableError("end"))


async def test_a_connection_that_is_silent_for_a_second_is_dropped():
    setup = Setup()
    first = await setup.asked()
    setup.timer()
    second = await setup.asked()
    setup.timer()
    assert (setup.lost, setup.transport.aborted) == ([], False)
    third = await setup.asked()
    setup.now_s = 100.0 + SILENCE_S
    setup.connection._timer_due_s = setup.now_s
    setup.timer()
    assert setup.transport.aborted
    assert str(setup.lost[0]) == "the shared state was silent for 1 s"
    assert (len(first), len(second), len(third)) == (1, 1, 1)
    assert str(third[0]) == "the shared state was silent for 1 s"


async def test_with_a_timeout_of_a_second_requests_fail_before_the_connection_is_dropped():
    setup = Setup()
    setup.connection.timeout_s = SILENCE_S
    replies = await setup.asked()
    setup.timer()
    assert type(replies[0]) is StoreSlowError
    assert setup.lost == []
    setup.timer()
    assert str(setup.lost[0]) == "the shared state was silent for 1.5 s"


async def test_a_delayed_process_reads_the_socket_before_it_applies_timeouts():
    setup = Setup()
    replies = await setup.asked()
    setup.timer(late_s=0.2)
    assert replies == []
    assert setup.connection._timer_due_s == pytest.approx(setup.now_s + READ_PAUSE_S)
    setup.connection.data_received(b"+in time\r\n")
    setup.timer()
    assert replies == [b"in time"]
    assert setup.lost == []


async def test_a_process_delayed_longer_than_the_silence_keeps_the_connection():
    setup = Setup()
    replies = await setup.asked()
    setup.timer(late_s=2 * SILENCE_S)
    setup.connection.data_received(b"+in time\r\n")
    setup.timer()
    assert (replies, setup.lost) == ([b"in time"], [])


async def test_a_delayed_process_waits_while_replies_come():
    setup = Setup()
    asked = [setup.ask() for _ in range(MAX_READ_PAUSES + 3)]
    await turn()
    setup.timer(late_s=0.2)
    for _ in range(3):
        setup.connection.data_received(b"+read in parts\r\n")
        setup.timer()
    assert not any(asked[3:])
    setup.timer()
    assert [len(replies) for replies in asked] == [1] * len(asked)
    assert setup.connection.lost is None


async def test_a_delayed_process_applies_timeouts_in_the_end_although_replies_come():
    setup = Setup()
    asked = [setup.ask() for _ in range(MAX_READ_PAUSES + 3)]
    await turn()
    for _ in range(MAX_READ_PAUSES):
        setup.timer(late_s=2 * LATE_S)
        setup.connection.data_received(b"+slow\r\n")
    assert asked[MAX_READ_PAUSES] == []
    setup.timer(late_s=2 * LATE_S)
    assert [len(replies) for replies in asked] == [1] * len(asked)


async def test_a_process_that_is_always_late_applies_timeouts_at_the_second_timer():
    setup = Setup()
    replies = await setup.asked()
    setup.timer(late_s=2 * LATE_S)
    assert replies == []
    setup.timer(late_s=2 * LATE_S)
    assert len(replies) == 1


async def test_a_blocked_event_loop_gets_its_replies(valkey):
    """With a real socket, in which the reply waits when the timer is overdue."""
    import time  # noqa: PLC0415

    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: Connection(lambda *_: None, lambda _error: None, timeout_s=TIMEOUT_S),
        "127.0.0.1",
        valkey.port,
    )
    reply = loop.create_future()
    connection.submit(Request(PING, reply.set_result))
    await asyncio.sleep(0)
    loop.call_soon(time.sleep, 10 * TIMEOUT_S)
    assert await reply == b"PONG"
    connection.drop(StoreUnavailableError("end"))


async def test_a_request_counts_by_its_weight_until_it_fails_or_is_answered():
    setup = Setup(max_requests=40)
    late = await setup.asked(weight=20)
    assert setup.connection._timer_due_s == pytest.approx(100 + TIMEOUT_S + 20 * REQUEST_S)
    setup.timer()
    assert len(late) == 1
    due_s = setup.now_s + TIMEOUT_S + 20 * REQUEST_S
    first, second = await setup.asked(weight=20), await setup.asked()
    assert setup.connection._timer_due_s == pytest.approx(due_s), "what is told is not waited for"
    assert isinstance(second[0], StoreOverloadedError), "but is in flight"
    setup.connection.data_received(b"+1\r\n+2\r\n")
    assert first == [b"2"]
    await setup.asked(weight=7)
    setup.timer()
    assert setup.now_s == pytest.approx(due_s - 13 * REQUEST_S)
    setup.connection.drop(StoreUnavailableError("end"))


async def test_a_flush_sends_requests_at_once_and_once():
    setup = Setup()
    setup.connection.flush()
    assert setup.transport.writes == []
    setup.ask()
    setup.connection.flush()
    assert setup.transport.writes == [PING]
    await turn()
    assert setup.transport.writes == [PING]
    setup.connection.drop(StoreUnavailableError("end"))


async def test_more_requests_than_may_be_in_flight_are_refused():
    setup = Setup(max_requests=2)
    asked = [setup.ask() for _ in range(3)]
    assert asked[2] == []
    await turn()
    assert isinstance(asked[2][0], StoreOverloadedError)
    setup.connection.data_received(b"+1\r\n")
    again_asked = await setup.asked()
    assert (asked[0], asked[1], again_asked) == ([b"1"], [], [])


async def test_more_octets_than_may_be_in_flight_are_refused():
    setup = Setup(max_bytes=2 * len(PING))
    asked = [setup.ask(), setup.ask(), await setup.asked()]
    assert isinstance(asked[2][0], StoreOverloadedError)
    setup.connection.data_received(b"+1\r\n")
    assert await setup.asked() == []
    assert isinstance((await setup.asked(2 * PING))[0], StoreOverloadedError)


async def test_the_loss_of_a_connection_fails_requests_in_flight_once():
    setup = Setup()
    replies = await setup.asked()
    setup.connection.connection_lost(None)
    setup.connection.connection_lost(None)
    setup.connection.drop(StoreUnavailableError("later"))
    assert [str(error) for error in replies] == ["the connection to the shared state was lost"]
    assert len(setup.lost) == 1
    assert not setup.transport.aborted
    setup.connection.look()
    refused = await setup.asked()
    assert [type(error) for error in refused] == [StoreUnavailableError]


async def test_unsent_requests_of_a_lost_connection_are_never_sent():
    setup = Setup()
    replies = setup.ask()
    setup.connection.drop(StoreUnavailableError("end"))
    await turn()
    assert [str(error) for error in replies] == ["end"]
    assert setup.transport.writes == []


async def test_each_request_gets_its_own_error_instance():
    setup = Setup()
    first, second = setup.ask(), await setup.asked()
    setup.connection.drop(StoreUnavailableError("end"))
    assert first[0] is not second[0]
    assert str(again(StoreCorruptError("text"))) == "text"


@pytest.mark.parametrize(
    "octets",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x15\x03\x01\x00\x02\x02",
        b"*4294967295\r\n",
        b"%1\r\n*0\r\n+x\r\n",  # TypeError
    ],
)
async def test_malformed_replies_end_the_connection(octets):
    setup = Setup()
    replies = await setup.asked()
    setup.connection.data_received(octets)
    assert setup.transport.aborted
    assert str(replies[0]) == "the shared state does not speak the Redis protocol"


@pytest.mark.parametrize("header", [b"*2147483647\r\n", b"%100000\r\n", b"$1000000\r\n"])
@pytest.mark.parametrize(
    "before", [b"", b"+OK\r\n", b"$3\r\nabc\r\n", b"*2\r\n$70\r\n" + b"x" * 70 + b"\r\n"]
)
async def test_a_header_that_announces_too_much_is_not_parsed_even_if_split(header, before):
    for first in range(len(before), len(before + header)):
        for second in range(first, len(before + header) + 1):
            setup = Setup()
            await setup.asked()
            await setup.asked()
            octets = before + header
            for part in (octets[:first], octets[first:second], octets[second:]):
                if part and not setup.transport.aborted:
                    setup.connection.data_received(part)
            assert setup.transport.aborted
            assert str(setup.lost[0]) == "the shared state does not speak the Redis protocol"


async def test_a_reply_as_long_as_the_bound_is_read():
    setup = Setup()
    replies = await setup.asked()
    setup.connection.data_received(b"*99999\r\n" + b":1\r\n" * 99_999)
    assert replies == [[1] * 99_999]


async def test_an_endless_reply_ends_the_connection():
    setup = Setup()
    replies = await setup.asked()
    setup.connection.data_received(b"*99999\r\n")
    element, fed = b"$999999\r\n" + bytes(999_999) + b"\r\n", 0
    while not setup.transport.aborted:
        setup.connection.data_received(element)
        fed += len(element)
    assert MAX_REPLY_BYTES < fed + len(b"*99999\r\n") <= MAX_REPLY_BYTES + len(element)
    assert str(replies[0]) == "the shared state does not speak the Redis protocol"


async def test_many_long_replies_do_not_exceed_the_limit_of_one():
    setup = Setup()
    element = b"$999999\r\n" + bytes(999_999) + b"\r\n"
    for _ in range(40):
        replies = await setup.asked()
        setup.connection.data_received(element)
        assert len(replies[0]) == 999_999
    assert not setup.transport.aborted


GARBAGE = [
    b"\0", b"\xff" * 64, b"\r\n", b"\n", b" ", b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n", b"\x16\x03\x01\x00\xa5\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b'{"a": 1}\r\n', b"?\r\n", b"@1\r\n", b"*\r\n", b"*-2\r\n", b"*+1\r\n", b"* 1\r\n", b"*1x\r\n",
    b"*18446744073709551616\r\n", b"*9223372036854775807\r\n", b"*1\r\n" * 12 + b":1\r\n", b"*99999\r\n" * 12,
    b"$\r\n", b"$-2\r\n", b"$abc\r\n", b"$9223372036854775807\r\n", b"$3\r\nabcdef\r\n", b"$0\r\n\r\n\r\n",
    b":\r\n", b":1x\r\n", b":99999999999999999999\r\n", b":-\r\n", b"+OK\n+OK\n" * 5_000 + b"\0\r\n\0\r\n",
    b"%1\r\n*0\r\n+x\r\n", b"%-2\r\n", b"~-2\r\n", b",nan,\r\n,\r\n", b"#x\r\n", b"_x\r\n", b"(12a\r\n",
    b"=3\r\nabc\r\n\0", b">1\r\n+x\r\n\0", b"|1\r\n+a\r\n+b\r\n\0", b"+OK\r\n+OK\r\n+OK\r\n",
]  # fmt: skip


@pytest.mark.parametrize("octets", GARBAGE)
@pytest.mark.parametrize("cut", [1, 7, 10_000])
async def test_each_request_is_resolved_once_and_in_time_on_any_input(octets, cut):
    setup = Setup()
    replies = [await setup.asked() for _ in range(2)]
    for first in range(0, len(octets), cut):
        if not setup.transport.aborted:
            setup.connection.data_received(octets[first : first + cut])
    while not setup.transport.aborted and setup.now_s < 100 + 2 * SILENCE_S:
        setup.timer()
    assert setup.transport.aborted
    assert [len(one) for one in replies] == [1, 1]


async def test_a_dripping_reply_fails_at_the_deadline_of_its_request():
    setup = Setup()
    replies = await setup.asked()
    for _ in range(20):
        setup.connection.data_received(b"+")
        setup.timer()
        if setup.transport.aborted:
            break
    assert isinstance(replies[0], StoreSlowError)
    assert setup.now_s <= 100 + SILENCE_S + TIMEOUT_S
    assert setup.transport.aborted


async def test_an_unrequested_reply_ends_the_connection():
    setup = Setup()
    setup.connection.data_received(b"+hello\r\n")
    assert str(setup.lost[0]) == "the shared state sent a reply without a request"


async def test_a_subclass_may_handle_unrequested_replies_and_continue():
    class Listener(Connection):
        def unasked(self, reply):
            self.received = reply
            return True

    listener = Listener(None, None, timeout_s=TIMEOUT_S)
    listener.data_received(b"+one\r\n+two\r\n")
    assert listener.received == b"two"


async def test_an_error_before_a_close_is_the_reason_of_the_loss():
    setup = Setup()
    setup.connection.data_received(b"-ERR max number of clients reached\r\n")
    assert str(setup.lost[0]) == "the shared state has reached its maximum of clients"


@pytest.mark.parametrize(
    "happens",
    [lambda setup: setup.connection.data_received(b"+1\r\n+2\r\n"), lambda setup: setup.timer()],
    ids=["replies", "a timeout"],
)
async def test_a_callback_may_drop_the_connection(happens):
    setup = Setup()
    setup.connection.submit(
        Request(PING, lambda _reply: setup.connection.drop(StoreUnavailableError("enough")))
    )
    replies = await setup.asked()
    happens(setup)
    assert [str(error) for error in replies] == ["enough"]
