"""What the contract allows: every RPC of a service, and the statuses that its comment in proto/ names.

Read from the descriptors and the comments themselves, so a new RPC, and an error that is no longer promised, count at
once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.inference.v1 import inference_pb2

_PROTO = Path(__file__).parents[3] / "proto"
_CODES = {code.name for code in grpc.StatusCode}
# What every RPC may answer, says the head of each file; and gRPC's own words for what came from no message of ours.
_COMMON = {"OK", "UNAUTHENTICATED", "PERMISSION_DENIED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED"}
# Refusals by the edge, before any RPC: what is no message, and too many calls at once.
_EDGE = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}


@dataclass(frozen=True)
class Rpc:
    """One RPC of the contract."""

    name: str
    path: str
    request_type: type[Message]
    statuses: frozenset[str]


def rpcs_of(service: ServiceDescriptor) -> Mapping[str, Rpc]:
    """Every RPC of a service, by name."""
    promised = _promised(_PROTO / service.file.name)
    found = {}
    for method in service.methods:
        found[method.name] = Rpc(
            method.name,
            f"/{service.full_name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            frozenset(promised[method.name] | _COMMON | _EDGE),
        )
    return found


def store_rpcs() -> Mapping[str, Rpc]:
    names = ("CacheStoreService", "AgentService", "MovingService")
    return {name: rpc for each in names for name, rpc in rpcs_of(_service(cachestore_pb2, each)).items()}


def engine_rpcs() -> Mapping[str, Rpc]:
    return rpcs_of(_service(inference_pb2, "InferenceService"))


def _service(module: Any, name: str) -> ServiceDescriptor:
    found: ServiceDescriptor = module.DESCRIPTOR.services_by_name[name]
    return found


def _promised(file: Path) -> dict[str, set[str]]:
    """RPC → codes behind "Errors:" in the comment above it. "as X's" takes those of X."""
    promised: dict[str, set[str]] = {}
    comment = ""
    for line in file.read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("//"):
            comment += stripped.removeprefix("//")
            continue
        if found := re.match(r"rpc (\w+)\(", stripped):
            _, _, errors = comment.partition("Errors:")
            codes = set(re.findall(r"[A-Z_]{5,}", errors)) & _CODES
            if like := re.search(r" as (\w+)'s", errors):
                codes |= promised[like[1]]
            promised[found[1]] = codes
        comment = ""
    return promised
