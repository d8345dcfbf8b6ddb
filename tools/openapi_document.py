"""The OpenAPI document of the JSON API, generated from the contract and its comments.

`make proto` writes it, and `make lint` compares it, with the other generated code (tools/generated_code.py).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2 as pb

from ratelimitd.services.methods import PACKAGE, ROLES
from ratelimitd.web.api.json_api import CHECK_METHOD, CHECK_PATH
from tools.contract import METHOD, SERVICE, Comments, comments_of, contract

Json = dict[str, Any]
Field = pb.FieldDescriptorProto

TITLE = "ratelimitd"
DESCRIPTION = """\
Decides whether requests may proceed. The same methods as over gRPC, in JSON by the Connect protocol: each is a `POST`
of a JSON object to the path of the method. Fields may be spelled as here or in camel case; one that is unknown is
refused. Answers spell them as here, with every field there. Every path is also served without `ratelimiter.v1.` in it.

An error is a status and an object with `code`, `message` and `details`. A denied check is no error: `allowed` is false.
"""

SCALARS: Mapping[int, Json] = {
    Field.TYPE_STRING: {"type": "string"},
    Field.TYPE_BOOL: {"type": "boolean"},
    Field.TYPE_INT32: {"type": "integer", "format": "int32"},
    # Proto3 JSON writes 64-bit integers as strings: JSON numbers may lose precision.
    Field.TYPE_INT64: {"type": ["string", "integer"], "format": "int64"},
    Field.TYPE_UINT64: {"type": ["string", "integer"], "format": "uint64"},
    Field.TYPE_DOUBLE: {"type": "number", "format": "double"},
}

WELL_KNOWN: Mapping[str, Json] = {
    ".google.protobuf.FieldMask": {"type": "string", "examples": ["limit,window_seconds"]},
    ".google.protobuf.Empty": {"type": "object", "maxProperties": 0},
}

RULE: Json = {
    "id": "0e8f3b6c-7b5e-4a39-9d5f-0a1c7f0f2b11",
    "endpoint": "/orders/{id}",
    "identifier_type": "user",
    "limit": 100,
    "window_seconds": 60,
    "algorithm": "token_bucket",
}
IDENTITY: Json = {"identifier_type": "user", "identifier": "alice"}
ASSIGNMENT: Json = {"identity": IDENTITY, "plan": "pro", "note": "until the trial ends"}
HOLD = "(the text that Hold returned)"
WHO: Json = {"identifier": "alice", "identifier_type": "user", "endpoint": RULE["endpoint"]}

EXAMPLES: Mapping[str, Json] = {
    "CreateRateLimit": {"rate_limit": RULE},
    "UpdateRateLimit": {"rate_limit": {"id": RULE["id"], "limit": 200}, "update_mask": "limit"},
    "ApplyRateLimits": {"rate_limits": [RULE], "prune": True, "dry_run": True},
    "ListRateLimits": {"identifier_type": "user", "page_size": 50},
    "GetRateLimit": {"endpoint": RULE["endpoint"], "identifier_type": "user"},
    "CheckRateLimit": WHO,
    "CheckRateLimitBatch": {"requests": [WHO, {**WHO, "tokens_requested": 5, "peek": True}]},
    "GetHealthStatus": {},
    "GetMetrics": {"names": ["rate_limiter_requests_allowed_total"]},
    "ExplainRateLimit": WHO,
    "ListUnmatched": {},
    "ResetRateLimit": WHO,
    "Hold": {"check": {**WHO, "tokens_requested": 5}, "hold_id": RULE["id"], "ttl_seconds": 30},
    "Extend": {"hold": HOLD, "ttl_seconds": 60},
    "Settle": {"hold": HOLD, "actual": 3},
    "ListHolds": {},
    "DeleteRateLimit": {"id": RULE["id"]},
    "AssignPlan": {"assignment": ASSIGNMENT},
    "GetAssignment": {"identity": IDENTITY},
    "ListAssignments": {"plan": "pro", "page_size": 50},
    "BatchAssignPlans": {"assignments": [ASSIGNMENT]},
    "UnassignPlan": {"identity": IDENTITY},
}
"""A request per method, in an order in which all succeed on a node without rules; a test sends them."""

ERRORS: Mapping[int, str] = {
    400: "A field is missing, unknown or wrong; every one of them is named. Nothing was changed. Or a hold"
    " has ended, or was settled with another number of tokens.",
    401: "No valid credentials for the role were sent.",
    403: "The credentials, or the place the request comes from, do not hold the role.",
    404: "No rule has this id, or this endpoint and identifier type, or the identity has no plan.",
    409: "The rule exists already, or an `etag` is another one by now: read it again.",
    413: "The body is too long.",
    415: "The content type is none of a call, or the body is compressed otherwise than with gzip.",
    429: "There are as many rules, assignments or holds as there may be, or too many resets in progress.",
    503: "The store that this call needs is not reached.",
}
FOR_ALL = (400, 401, 403, 413, 415)
ERRORS_OF: Mapping[str, tuple[int, ...]] = {
    "CreateRateLimit": (409, 429, 503),
    "UpdateRateLimit": (404, 409, 503),
    "DeleteRateLimit": (404, 409, 503),
    "ListRateLimits": (503,),
    "GetRateLimit": (404, 503),
    "ApplyRateLimits": (409, 429, 503),
    "ExplainRateLimit": (503,),
    "ResetRateLimit": (429, 503),
    "AssignPlan": (409, 429, 503),
    "UnassignPlan": (404, 409, 503),
    "GetAssignment": (404, 503),
    "ListAssignments": (503,),
    "BatchAssignPlans": (409, 429, 503),
    "Hold": (429,),
    "Settle": (503,),
    "Extend": (503,),
}

LIMIT_HEADERS: Json = {
    "RateLimit-Policy": {
        "description": "The rule that decided: its id, limit and window. Absent when none did.",
        "schema": {"type": "string"},
        "example": f'"{RULE["id"]}";q=100;w=60',
    },
    "RateLimit": {
        "description": "What is left of it, and for how many seconds that has to last.",
        "schema": {"type": "string"},
        "example": f'"{RULE["id"]}";r=42;t=35',
    },
}
RETRY_AFTER: Json = {
    "Retry-After": {
        "description": "Seconds until this same check would pass if no other caller spends.",
        "schema": {"type": "integer", "minimum": 1},
    }
}

ERROR_SCHEMA: Json = {
    "type": "object",
    "description": "What a call failed with, as the Connect protocol tells it.",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string", "description": "The name of the gRPC status.", "examples": ["invalid_argument"]},
        "message": {"type": "string", "description": "For people; it may change."},
        "details": {
            "type": "array",
            "description": "Messages of google.rpc; the first is an ErrorInfo with a reason that does not change.",
            "items": {
                "type": "object",
                "required": ["type", "value"],
                "properties": {
                    "type": {"type": "string", "examples": ["google.rpc.BadRequest"]},
                    "value": {"type": "string", "description": "The message, serialised, in base64 without padding."},
                    "debug": {"type": "object", "description": "The same in JSON."},
                },
            },
        },
    },
}  # fmt: skip


def main() -> None:
    """Print the document in its file format."""
    print(json.dumps(document(contract()), indent=1, ensure_ascii=False))


def demand_complete(file: pb.FileDescriptorProto, comments: Comments) -> None:
    """Verify that every method has the descriptions that the document needs.

    Raises:
        SystemExit: names each method, what is missing, and where it belongs.
    """
    lacking = []
    for number, service in enumerate(file.service):
        if (SERVICE, number) not in comments:
            lacking.append(f"{service.name}: its meaning, in MEANINGS of tools/contract.py")
        for index, method in enumerate(service.method):
            if f"/{PACKAGE}{service.name}/{method.name}" not in ROLES:
                lacking.append(f"{method.name}: its role, in src/ratelimitd/services/methods.py")
            if (SERVICE, number, METHOD, index) not in comments:
                lacking.append(f"{method.name}: its meaning, in MEANINGS of tools/contract.py")
            if method.name not in EXAMPLES:
                text = "an example, in EXAMPLES of tools/openapi_document.py"
                lacking.append(f"{method.name}: {text}; its errors, in ERRORS_OF there")
    if lacking:
        raise SystemExit("\n".join(["of methods of the contract lacks:", *lacking]))


def document(file: pb.FileDescriptorProto) -> Json:
    """Return the OpenAPI document for a contract."""
    comments = comments_of(file)
    demand_complete(file, comments)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": TITLE,
            "version": file.package,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": service.name, "description": comments[6, number]}
            for number, service in enumerate(file.service)
        ],
        "paths": dict(paths(file, comments)),
        "components": {
            "schemas": {**dict(schemas(file, comments)), "Error": ERROR_SCHEMA},
            "responses": {f"Error{status}": error_response(status) for status in ERRORS},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "CHECK_TOKEN or ADMIN_TOKEN; where that is not set, the token in"
                    " STATE_DIR/admin-token. Without CHECK_TOKEN, checks need none.",
                }
            },
        },
        "security": [{"token": []}, {}],
    }


def schemas(file: pb.FileDescriptorProto, comments: Comments) -> Iterator[tuple[str, Json]]:
    """Yield a schema for each message and enum."""
    for number, enum in enumerate(file.enum_type):
        meanings = {
            value.name: comments.get((5, number, 2, index), "")
            for index, value in enumerate(enum.value)
        }
        lines = [f"`{name}`: {meaning}" for name, meaning in meanings.items() if meaning]
        schema: Json = {"type": "string", "enum": list(meanings)}
        yield enum.name, {**schema, "description": "; ".join(lines)} if lines else schema
    for number, message in enumerate(file.message_type):
        entries = {
            f".{file.package}.{message.name}.{nested.name}": nested
            for nested in message.nested_type
            if nested.options.map_entry
        }
        properties = {
            field.name: described(
                field_schema(field, entries), comments.get((4, number, 2, index), "")
            )
            for index, field in enumerate(message.field)
        }
        yield (
            message.name,
            {"type": "object", "properties": properties, "additionalProperties": False},
        )


def field_schema(field: Field, entries: Mapping[str, pb.DescriptorProto]) -> Json:
    """Return the schema of a field's value."""
    if field.type_name in entries:
        [value] = [part for part in entries[field.type_name].field if part.name == "value"]
        return {"type": "object", "additionalProperties": field_schema(value, {})}
    item = SCALARS[field.type] if field.type in SCALARS else type_schema(field.type_name)
    return {"type": "array", "items": item} if field.label == Field.LABEL_REPEATED else {**item}


def type_schema(name: str) -> Json:
    """Return the schema of a message or an enum by its full name."""
    return WELL_KNOWN.get(name) or {"$ref": f"#/components/schemas/{name.rpartition('.')[2]}"}


def described(schema: Json, comment: str) -> Json:
    """Return the schema with the contract's comment as description."""
    return {**schema, "description": comment} if comment else schema


def paths(file: pb.FileDescriptorProto, comments: Comments) -> Iterator[tuple[str, Json]]:
    """Yield each method, and the check for callers that forward the answer."""
    for number, service in enumerate(file.service):
        for index, method in enumerate(service.method):
            path = f"/{PACKAGE}{service.name}/{method.name}"
            found = operation(path, method, comments[6, number, 2, index])
            found["responses"]["200"]["content"] = body(type_schema(method.output_type))
            yield path, {"post": {"tags": [service.name], **found}}
            if path == CHECK_METHOD:
                yield CHECK_PATH, {"post": {"tags": [service.name], **http_check(method)}}


def operation(path: str, method: pb.MethodDescriptorProto, summary: str) -> Json:
    """Return the request, response and errors of a method."""
    errors = sorted((*FOR_ALL, *ERRORS_OF.get(method.name, ())))
    return {
        "operationId": method.name,
        "summary": summary,
        "description": f"Role: {ROLES[path]}.",
        "requestBody": {
            "required": True,
            "content": body(type_schema(method.input_type), EXAMPLES[method.name]),
        },
        "responses": {
            "200": {"description": "The answer."},
            **{str(status): {"$ref": f"#/components/responses/Error{status}"} for status in errors},
        },
    }


def http_check(method: pb.MethodDescriptorProto) -> Json:
    """Return the operation of the check with HTTP statuses."""
    found = operation(
        CHECK_METHOD, method, "Decides as CheckRateLimit does, and answers 429 when it denies."
    )
    decision = body(type_schema(method.output_type))
    found["operationId"] = "Check"
    found["responses"] |= {
        "200": {"description": "Allowed, or let through unchecked.", "headers": LIMIT_HEADERS, "content": decision},
        "429": {"description": "Denied.", "headers": {**RETRY_AFTER, **LIMIT_HEADERS}, "content": decision},
    }  # fmt: skip
    return found


def error_response(status: int) -> Json:
    """Return the response for an error status; plain text for a wrong content type, which is not yet a call."""
    response: Json = {"description": ERRORS[status]}
    if status != 415:  # noqa: PLR2004 -- a status of HTTP
        response["content"] = body({"$ref": "#/components/schemas/Error"})
    return response


def body(schema: Json, example: Json | None = None) -> Json:
    """Return a JSON body."""
    content: Json = {"schema": schema}
    if example is not None:
        content["example"] = example
    return {"application/json": content}


if __name__ == "__main__":
    main()
