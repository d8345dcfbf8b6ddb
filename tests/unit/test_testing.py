import httpx
import pytest

from ratelimitd.errors import SettingsError
from ratelimitd.testing import ManualClock, running_node


def test_a_manual_clock_moves_only_when_told_to():
    clock = ManualClock(now_us=5_000_000)
    assert (clock.now_us(), clock.now_us(), clock.monotonic_us()) == (5_000_000, 5_000_000, 0)
    clock.advance(seconds=1.5, us=3)
    assert (clock.now_us(), clock.monotonic_us()) == (6_500_003, 1_500_003)
    assert clock.remeasure() == 0


def test_time_does_not_pass_backwards():
    clock = ManualClock()
    with pytest.raises(ValueError, match=r"use step\(\)"):
        clock.advance(us=-1)


def test_a_step_moves_the_wall_clock_alone():
    clock = ManualClock(now_us=10)
    clock.step(-4)
    assert (clock.now_us(), clock.monotonic_us()) == (6, 0)


async def test_a_running_node_answers_on_free_ports_until_the_block_ends():
    async with running_node() as node, running_node(node_id="second") as second:
        assert node.grpc_address != second.grpc_address
        assert second.node_id == "second"
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://{node.http_address}/readyz")
            assert answer.status_code == 200
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://{node.http_address}/readyz")


async def test_settings_of_a_running_node_are_judged_like_all_others():
    with pytest.raises(SettingsError, match="--lissen"):
        async with running_node(lissen="127.0.0.1:0"):
            pass


async def test_a_running_node_is_drained_when_the_block_ends_with_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError):
        async with running_node(state_dir=tmp_path):
            raise ZeroDivisionError
    async with running_node(state_dir=tmp_path):
        pass
