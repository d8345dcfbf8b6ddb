import grpc

from ratelimitd.rpc.interface import Methods, RpcError, StatusCode


def test_status_codes_have_the_names_and_numbers_of_grpc():
    assert {code.name: code.value for code in StatusCode} == {
        code.name: code.value[0] for code in grpc.StatusCode
    }


def test_an_error_carries_what_ends_the_call():
    error = RpcError(StatusCode.ABORTED, "no", b"d")
    assert (error.code, error.message, error.details, str(error)) == (10, "no", b"d", "no")
    assert RpcError(StatusCode.ABORTED, "no").details == b""


def test_a_node_without_methods_is_a_valid_one():
    assert Methods() == Methods({}, {}, {})
