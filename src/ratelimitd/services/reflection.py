"""Server reflection, v1 and v1alpha: the services and their descriptors.

Pure look-ups in a descriptor pool. The two versions differ only in the name of their package, so the messages of
v1alpha, which a library provides, serve both. The library's own servicer is not used, since it imports a transport.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Final

from google.protobuf import descriptor_pb2, empty_pb2, field_mask_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ratelimitd.rpc.interface import Call, Methods, StatusCode
from ratelimitd.services import convert_envoy
from ratelimitd.services.wire_format import parsed
from ratelimiter.v1 import ratelimiter_pb2

V1: Final = "grpc.reflection.v1.ServerReflection"
V1ALPHA: Final = "grpc.reflection.v1alpha.ServerReflection"

_Request = reflection_pb2.ServerReflectionRequest
_Response = reflection_pb2.ServerReflectionResponse
_Answer = Callable[[_Request], _Response]


class ReflectionService:
    """Handlers of reflection over ``service_names``."""

    def __init__(self, service_names: Collection[str]) -> None:
        self._service_names = sorted(service_names)
        self._pool = _served_files()
        # Without file_containing_extension: messages of proto3 files have no extensions.
        self._answers: dict[str, _Answer] = {
            "list_services": self._list_services,
            "file_by_filename": self._file_by_filename,
            "file_containing_symbol": self._file_containing_symbol,
            "all_extension_numbers_of_type": self._all_extension_numbers_of_type,
        }

    def methods(self) -> Methods:
        """Return the handlers by path."""
        return Methods(
            bidi_stream={
                f"/{V1}/ServerReflectionInfo": self.server_reflection_info,
                f"/{V1ALPHA}/ServerReflectionInfo": self.server_reflection_info,
            }
        )

    async def server_reflection_info(
        self, requests: AsyncIterator[bytes], _call: Call
    ) -> AsyncIterator[bytes]:
        """Answer each request of a stream."""
        async for data in requests:
            yield self.answer(data)

    def answer(self, data: bytes) -> bytes:
        """Answer one request; unknown names are reported in the answer, not as an error of the call."""
        request = parsed(_Request, data)
        asked = request.WhichOneof("message_request")
        try:
            response = (
                self._answers[asked](request)
                if asked
                else _error(StatusCode.INVALID_ARGUMENT, "the request asks for nothing")
            )
        except KeyError:
            response = _error(StatusCode.NOT_FOUND, "not found")
        response.valid_host = request.host
        response.original_request.CopyFrom(request)
        return response.SerializeToString()

    def _list_services(self, _request: _Request) -> _Response:
        services = [reflection_pb2.ServiceResponse(name=name) for name in self._service_names]
        listed = reflection_pb2.ListServiceResponse(service=services)
        return _Response(list_services_response=listed)

    def _file_by_filename(self, request: _Request) -> _Response:
        return _files(self._pool.FindFileByName(request.file_by_filename))

    def _file_containing_symbol(self, request: _Request) -> _Response:
        symbol = request.file_containing_symbol
        try:
            return _files(self._pool.FindFileContainingSymbol(symbol))
        except KeyError:  # the pool does not find methods by this
            return _files(self._pool.FindMethodByName(symbol).containing_service.file)

    def _all_extension_numbers_of_type(self, request: _Request) -> _Response:
        extended = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
        numbers = reflection_pb2.ExtensionNumberResponse(base_type_name=extended.full_name)
        return _Response(all_extension_numbers_response=numbers)


def _error(code: StatusCode, message: str) -> _Response:
    error = reflection_pb2.ErrorResponse(error_code=code, error_message=message)
    return _Response(error_response=error)


def _files(file: FileDescriptor) -> _Response:
    """Return a file and all its imports, which a client needs to interpret it."""
    needed = {each.name: each.serialized_pb for each in _with_imports(file)}
    found = reflection_pb2.FileDescriptorResponse(file_descriptor_proto=needed.values())
    return _Response(file_descriptor_response=found)


def _with_imports(file: FileDescriptor) -> Iterator[FileDescriptor]:
    yield file
    for imported in file.dependencies:
        yield from _with_imports(imported)


def _served_files() -> DescriptorPool:
    """Return a pool of the files this node serves; the default pool would reveal all files the process has imported."""
    pool = DescriptorPool()
    for module in (empty_pb2, field_mask_pb2, ratelimiter_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.Add(_reflection_v1())
    for file in convert_envoy.files():
        pool.Add(file)
    return pool


def _reflection_v1() -> descriptor_pb2.FileDescriptorProto:
    """Return the file of v1: that of v1alpha with the other package name."""
    v1 = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(v1)
    v1.name = v1.name.replace("v1alpha", "v1")
    v1.package = v1.package.replace("v1alpha", "v1")
    for message in v1.message_type:
        for field in message.field:
            # Set only for message fields; must stay unset for others.
            if field.type_name:
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in v1.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    return v1
