"""The contract for document generators: its descriptor, and a description of each of its parts.

The generated classes lack the comments, so the contract is compiled again. It is fixed; descriptions that it lacks are
defined here.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from google.protobuf import descriptor_pb2 as pb

PROTO: Final = Path(__file__).resolve().parent.parent / "proto"
CONTRACT: Final = "ratelimiter/v1/ratelimiter.proto"

MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD = METHOD = VALUE = 2
"""Field numbers in descriptor.proto, which together with indexes form the path of a comment."""

Comments = Mapping[tuple[int, ...], str]
"""By path, in one line."""

MEANINGS: Final = {
    "RateLimiterConfig": "The rules. A change is in force on the node that took it when its answer arrives.",
    "RateLimiterHealth": "How the node is that took the call, why a check is answered as it is, and the reset of one"
    " identifier.",
    "CheckRateLimit": "Decides whether a request may proceed, and spends its cost if so. A denial is an answer.",
    "CheckRateLimitBatch": "Decides up to 1000 requests as if they were sent one by one in this order; a malformed one"
    " is told so in its own answer.",
    "CreateRateLimit": "Adds a rule.",
    "UpdateRateLimit": "Changes the fields of a rule that the mask names, or without a mask the whole rule.",
    "DeleteRateLimit": "Takes a rule out.",
    "ListRateLimits": "Lists the rules, page by page.",
    "GetRateLimit": "Reads one rule, by its id or by its endpoint and identifier type.",
    "ApplyRateLimits": "Brings the rules to a whole set: all changes in one transaction, or none.",
    "ExplainRateLimit": "Tells what a check would be answered, and why: each rule that was looked at.",
    "ListUnmatched": "Lists the endpoints that are asked for and have no rule.",
    "RateLimiterPlans": "Which plan an identity has: the limits that take the place of a rule's own. A change is in"
    " force on the node that took it when its answer arrives.",
    "AssignPlan": "Assigns an identity to a plan, in the place of the one it has.",
    "UnassignPlan": "Takes the assignment of an identity away.",
    "GetAssignment": "Tells which plan an identity has.",
    "ListAssignments": "Lists assignments, page by page.",
    "BatchAssignPlans": "Assigns up to 1000 identities to plans: all of them, or none.",
    "Hold": "Decides as CheckRateLimit does, and holds what it charges until Settle says what the request has cost.",
    "Settle": "Charges what a request has cost in place of what was held: once, however often it is sent.",
    "Extend": "Lets a hold end later, so that a long stream keeps its slot.",
    "ListHolds": "Lists by limit how many holds in flight this node has made.",
    "GetHealthStatus": "Tells how the node was over the last 60 s.",
    "GetMetrics": "Tells what the node has counted since it started.",
    "ResetRateLimit": "Lets one identifier start afresh on one endpoint. What is not limited is reset already.",
}
"""Descriptions of services and methods without a comment."""


def contract() -> pb.FileDescriptorProto:
    """Return the contract with its comments."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory, "contract")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"]
        command += ["--include_source_info", f"--descriptor_set_out={compiled}", CONTRACT]
        subprocess.run(command, check=True)
        [file] = pb.FileDescriptorSet.FromString(compiled.read_bytes()).file
    return file


def comments_of(file: pb.FileDescriptorProto) -> Comments:
    """Return the description of each part of a contract."""
    found = {
        (SERVICE, number, *place): MEANINGS[name]
        for number, service in enumerate(file.service)
        for place, name in (
            ((), service.name),
            *(((METHOD, index), method.name) for index, method in enumerate(service.method)),
        )
        if name in MEANINGS
    }
    for location in file.source_code_info.location:
        # Before the element, or after it on the same line.
        comment = location.leading_comments or location.trailing_comments
        if comment:
            found[tuple(location.path)] = " ".join(comment.split())
    return found
