"""What becomes of a real node: killed and started again, paused and let go on, cut off and reached again."""

import signal
from contextlib import contextmanager

from tests.chaos_proxy import ChaosProxy
from tests.servers import free_port
from tests.system.process import Files


@contextmanager
def node_of(directory, *options):
    with Files(directory).serving(*options) as node:
        node.create_rule("/many", 1_000_000_000)
        node.create_rule("/once", 1)
        yield node


def killed(directory, stack):
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    node = stack.enter_context(node_of(directory, *listen))

    def kill():
        node.signal(signal.SIGKILL)
        node.ended()

    return node.grpc_address, kill, lambda: stack.enter_context(Files(directory).serving(*listen))


def paused(directory, stack):
    node = stack.enter_context(node_of(directory))
    return (
        node.grpc_address,
        lambda: node.signal(signal.SIGSTOP),
        lambda: node.signal(signal.SIGCONT),
    )


def cut_off(directory, stack):
    node = stack.enter_context(node_of(directory))
    proxy = stack.enter_context(ChaosProxy(int(node.grpc_address.rpartition(":")[2])))
    return proxy.address, proxy.partition, proxy.heal


OUTAGES = {"killed": killed, "paused": paused, "cut off": cut_off}
"""Each gives the address that an application asks, what begins the outage, and what ends it."""
