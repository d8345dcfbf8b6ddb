from pathlib import Path

import pytest

from ratelimitd.settings import parsing as values
from ratelimitd.settings.parsing import MASK, Address


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (values.address, "127.0.0.1:9090", Address("127.0.0.1", 9090)),
        (values.address, "[::]:0", Address("::", 0)),
        (values.address, "localhost:65535", Address("localhost", 65535)),
        (values.optional(values.address), "", None),
        (values.optional(values.path), "a b", Path("a b")),
        (values.path, "/x", Path("/x")),
        (values.one_of("a", "b"), "b", "b"),
        (values.on_off, "on", True),
        (values.on_off, "off", False),
        (values.fraction, "0", 0.0),
        (values.fraction, "0.25", 0.25),
        (values.fraction, ".5", 0.5),
        (values.fraction, "1", 1.0),
        (values.fraction, "1.00", 1.0),
        (values.optional_url, "", ""),
        (values.optional_url, "http://c:4318", "http://c:4318"),
        (values.optional_url, "https://[::1]:4318/x/v1/traces", "https://[::1]:4318/x/v1/traces"),
        (values.whole_number(1, 10), "1", 1),
        (values.whole_number(1, 10), "10", 10),
        (values.names, "", ()),
        (values.names, " a , b", ("a", "b")),
        (
            values.host_names,
            "Limits.example.com, 10-0-0-1.a_b",
            ("Limits.example.com", "10-0-0-1.a_b"),
        ),
        (values.identifier_keys, "", {}),
        (values.identifier_keys, "ip=ip, a=b=user", {"ip": "ip", "a=b": "user"}),
        (values.identifier_headers, "", {}),
        (
            values.identifier_headers,
            "X-Api-Key=api_key, X-Forwarded-For=ip,x-t=tenant",
            {"x-api-key": "api_key", "x-forwarded-for": "ip", "x-t": "tenant"},
        ),
        (values.path_templates, "", ()),
        (
            values.path_templates,
            "GET /a/{id}, a.example/, /{a}/b/{rest...},/a-b_c.d~:@é",
            ("GET /a/{id}", "a.example/", "/{a}/b/{rest...}", "/a-b_c.d~:@é"),
        ),
        (values.path_templates, "/" + "x" * 254, ("/" + "x" * 254,)),
        (values.path_templates, "/", ("/",)),
        (values.path_templates, "/.well-known/..x/a.b", ("/.well-known/..x/a.b",)),
        (values.path_templates, "/v1/orders:cancel", ("/v1/orders:cancel",)),
        (values.token, "", ""),
        (values.token, "a-Z_09.~+/==", "a-Z_09.~+/=="),
        (values.token, "x" * values.MAX_TOKEN_CHARACTERS, "x" * values.MAX_TOKEN_CHARACTERS),
        (values.key_secret, "", b""),
        (values.key_secret, "é" * 8, "é".encode() * 8),
        (values.key_secret, "x" * 64, b"x" * 64),
        (values.node_id, "", ""),
        (values.node_id, "host:1", "host:1"),
        (values.node_id, "x" * 128, "x" * 128),
        (values.database_url, "postgresql://u:p@h:5/d", "postgresql://u:p@h:5/d"),
        (values.redis_url, "", ""),
        (values.redis_url, "redis+cluster://a,b", "redis+cluster://a,b"),
    ],
)
def test_valid_text_is_parsed_to_a_value(parse, text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (values.address, ""),
        (values.identifier_keys, "ip"),
        (values.identifier_keys, "=ip"),
        (values.identifier_keys, "ip=Address"),
        (values.identifier_keys, "ip=all"),
        (values.identifier_headers, "x-user"),
        (values.identifier_headers, "x-user=all"),
        (values.identifier_headers, "x user=user"),
        (values.identifier_headers, "x-user=user,X-User=api_key"),
        (values.identifier_headers, "x-forwarded-for=user"),
        (values.path_templates, "orders/{id}"),
        (values.path_templates, "/orders/*"),
        (values.path_templates, "/orders/:id"),
        (values.path_templates, "/<id>/items"),
        (values.path_templates, "/a%2Fb"),
        (values.path_templates, "/a/../b"),
        (values.path_templates, "/a/."),
        (values.path_templates, "/a?b"),
        (values.path_templates, "/a{id}"),
        (values.path_templates, "/{}"),
        (values.path_templates, "/{rest...}/b"),
        (values.path_templates, "get /a"),
        (values.path_templates, "GET  /a"),
        (values.path_templates, "A.example/a"),
        (values.path_templates, "/a,/a"),
        (values.path_templates, "/" + "x" * 255),
        (values.path_templates, ",".join(f"/{number}" for number in range(257))),
        (values.identifier_types, "Tenant"),
        (values.identifier_types, "tenant,model+user"),
        (values.identifier_types, "tenant,tenant"),
        (values.identifier_types, "user"),
        (values.identifier_types, "all"),
        (values.identifier_types, "9a"),
        (values.identifier_types, "x" * 33),
        (values.identifier_keys, "ip=ip,ip=user"),
        (values.address, "9090"),
        (values.address, ":9090"),
        (values.address, "::1:9090"),
        (values.address, "host:65536"),
        (values.address, "host:-1"),
        (values.address, "host:٣"),
        (values.address, "a b:1"),
        (values.address, "host:1\n"),
        (values.path, ""),
        (values.path, "a\0b"),
        (values.one_of("a", "b"), "A"),
        (values.on_off, "true"),
        (values.fraction, ""),
        (values.fraction, "1.1"),
        (values.fraction, "-0.1"),
        (values.fraction, "1e-1"),
        (values.fraction, "nan"),
        (values.fraction, "0."),
        (values.optional_url, "collector:4318"),
        (values.optional_url, "grpc://c:4317"),
        (values.optional_url, "http://user:pass@c"),
        (values.optional_url, "http://c?x=1"),
        (values.optional_url, "http://"),
        (values.whole_number(1, 10), "0"),
        (values.whole_number(1, 10), "11"),
        (values.whole_number(1, 10), "1.0"),
        (values.whole_number(1, 10), "+1"),
        (values.whole_number(1, 10), ""),
        (values.whole_number(1, 10), "9" * 5000),
        (values.names, "a,,b"),
        (values.names, "a\x07"),
        (values.host_names, "https://limits.example.com"),
        (values.host_names, "limits.example.com:8080"),
        (values.host_names, "a.example,*.example"),
        (values.host_names, "a b"),
        (values.token, "a b"),
        (values.token, "=a"),
        (values.token, "é"),
        (values.token, "x\n"),
        (values.token, "x" * (values.MAX_TOKEN_CHARACTERS + 1)),
        (values.key_secret, "x" * 15),
        (values.key_secret, "x" * 65),
        (values.node_id, "a b"),
        (values.node_id, "x" * 129),
        (values.database_url, ""),
        (values.user_header, "Host"),
        (values.user_header, "X_User"),
        (values.user_header, "X-U "),
    ],
)
def test_invalid_text_is_refused_without_quoting_it(parse, text):
    with pytest.raises(ValueError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(("must ", "names ", "is "))
    assert len(text) < 15 or text not in message


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "on"),
        (False, "off"),
        (None, ""),
        (5, "5"),
        (Path("a/b"), "a/b"),
        (("a", "b"), "a,b"),
        ((), ""),
        ({"a=b": "user", "c": "ip"}, "a=b=user,c=ip"),
        ({}, ""),
        (Address("::1", 1), "[::1]:1"),
        (Address("h", 2), "h:2"),
    ],
)
def test_a_shown_value_can_be_set_again(value, text):
    assert values.shown(value) == text


def test_a_masked_secret_shows_only_whether_it_is_set():
    assert (values.masked("x"), values.masked(b"x"), values.masked("")) == (MASK, MASK, "")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("", ""),
        ("postgresql://u:pw@h/d", f"postgresql://u:{MASK}@h/d"),
        ("redis://:p@ss/w@h:1/0", f"redis://:{MASK}@h:1/0"),
        ("redis://h/0?password=pw&x=1", f"redis://h/0?password={MASK}&x=1"),
        ("postgresql://h/d?sslpassword=pw", f"postgresql://h/d?sslpassword={MASK}"),
        ("redis://h/0?passw%6Frd=pw&x=a%40b", f"redis://h/0?passw%6Frd={MASK}&x=a%40b"),
        (
            "redis+sentinel://s:1/m?sentinel_password=p@w=x?y",
            f"redis+sentinel://s:1/m?sentinel_password={MASK}",
        ),
        (
            "redis+sentinel://u:pw@s:1/m?sentinel_password=p@w&db=1",
            f"redis+sentinel://u:{MASK}@s:1/m?sentinel_password={MASK}&db=1",
        ),
    ],
)
def test_a_url_is_shown_without_its_password(url, shown):
    assert values.masked_url(url) == shown
