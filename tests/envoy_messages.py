"""Envoy's messages as Envoy has them, from the descriptors that a node shows by reflection."""

from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from ratelimitd.services.convert_envoy import PACKAGE, files

_POOL = DescriptorPool()
for _file in files():
    _POOL.Add(_file)


def _message(name) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


Request = _message("RateLimitRequest")
Response = _message("RateLimitResponse")


def request_of(domain, *descriptors, hits=0):
    """A request; a descriptor is a list of (key, value), or that and its hits."""
    request = Request(domain=domain, hits_addend=hits)
    for descriptor in descriptors:
        entries, own_hits = descriptor if isinstance(descriptor, tuple) else (descriptor, None)
        added = request.descriptors.add()
        for key, value in entries:
            added.entries.add(key=key, value=value)
        if own_hits is not None:
            added.hits_addend.value = own_hits
    return request


def giving_back(*descriptors, domain="edge", hits=0):
    """A request whose descriptors give their hits back."""
    request = request_of(domain, *descriptors, hits=hits)
    for descriptor in request.descriptors:
        descriptor.is_negative_hits = True
    return request
