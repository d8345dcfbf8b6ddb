"""The baseline of the transport: a bare grpc.aio server with a fixed answer. Prints its port."""

import grpc
import uvloop

ANSWER = b"\x08\x01\x10\xe7\x07\x18\x80\xf9\xd3\xaa\x06\x28\x01\x30\xe8\x07\x38\x3c"


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types of its own
    """Answers every call."""

    def service(self, _call_details: object) -> grpc.RpcMethodHandler:
        """Return the only handler."""
        return grpc.unary_unary_rpc_method_handler(_answer)


async def _answer(_message: bytes, _context: object) -> bytes:
    return ANSWER


async def _main() -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Echo(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_main())
