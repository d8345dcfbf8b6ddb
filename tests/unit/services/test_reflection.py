import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2

from ratelimitd.errors import InvalidInputError
from ratelimitd.services.reflection import V1, V1ALPHA, ReflectionService
from tests.unit.services.fake_call import FakeCall

OURS = "ratelimiter/v1/ratelimiter.proto"


@pytest.fixture
def service():
    return ReflectionService(["b.B", "a.A"])


def ask(service, **question):
    request = reflection_pb2.ServerReflectionRequest(host="h", **question)
    answer = reflection_pb2.ServerReflectionResponse.FromString(
        service.answer(request.SerializeToString())
    )
    assert (answer.valid_host, answer.original_request) == ("h", request)
    return answer


def files_of(answer):
    return [
        FileDescriptorProto.FromString(data)
        for data in answer.file_descriptor_response.file_descriptor_proto
    ]


def test_services_are_listed_in_order(service):
    answer = ask(service, list_services="*")
    assert [found.name for found in answer.list_services_response.service] == ["a.A", "b.B"]


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": OURS},
        {"file_containing_symbol": "ratelimiter.v1.RateLimiter"},
        {"file_containing_symbol": "ratelimiter.v1.RateLimit.limit"},
        {"file_containing_symbol": "ratelimiter.v1.RateLimiter.CheckRateLimit"},
    ],
)
def test_a_file_is_returned_with_all_its_imports(service, question):
    names = [file.name for file in files_of(ask(service, **question))]
    assert names == [OURS, "google/protobuf/empty.proto", "google/protobuf/field_mask.proto"]


@pytest.mark.parametrize("symbol", [V1, V1ALPHA])
def test_both_versions_of_reflection_describe_themselves(service, symbol):
    [file] = files_of(ask(service, file_containing_symbol=symbol))
    assert file.package == symbol.removesuffix(".ServerReflection")
    [method] = file.service[0].method
    assert method.input_type == f".{file.package}.ServerReflectionRequest"


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "nope.proto"},
        {"file_containing_symbol": "nope.Nope"},
        {"file_containing_extension": {"containing_type": "ratelimiter.v1.RateLimit", "extension_number": 100}},
        {"all_extension_numbers_of_type": "nope.Nope"},
    ],
)  # fmt: skip
def test_an_unknown_name_is_reported_in_the_answer(service, question):
    answer = ask(service, **question)
    assert answer.error_response.error_code == 5


def test_no_message_can_be_extended(service):
    answer = ask(service, all_extension_numbers_of_type="ratelimiter.v1.RateLimit")
    response = answer.all_extension_numbers_response
    assert (response.base_type_name, list(response.extension_number)) == (
        "ratelimiter.v1.RateLimit", [],
    )  # fmt: skip


def test_an_empty_request_is_invalid(service):
    assert ask(service).error_response.error_code == 3


def test_malformed_bytes_of_a_reflection_request_are_refused(service):
    with pytest.raises(InvalidInputError):
        service.answer(b"\xff")


@pytest.mark.parametrize("name", [V1, V1ALPHA])
async def test_every_request_of_a_stream_is_answered(service, name):
    async def questions():
        for _ in range(2):
            yield reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()

    handler = service.methods().bidi_stream[f"/{name}/ServerReflectionInfo"]
    assert len([answer async for answer in handler(questions(), FakeCall())]) == 2
