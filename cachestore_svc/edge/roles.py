"""The roles that may call each RPC of the store's services; an engine calls for callers whose roles it has checked."""

from kvasir.credentials import ADMIN, CLIENT, ENGINE, PEER

SERVICE_NAME = "kvasir.cachestore.v1.CacheStoreService"
AGENT_SERVICE_NAME = "kvasir.cachestore.v1.AgentService"
PEER_SERVICE_NAME = "kvasir.cachestore.v1.PeerService"
MOVING_SERVICE_NAME = "kvasir.cachestore.v1.MovingService"

_EVERYBODY = {ENGINE, CLIENT, PEER, ADMIN}
# A peer reads what it was given the token for, neither writes nor prolongs lives, and takes and gives agents by moves.
_WRITERS = {ENGINE, CLIENT}
PEOPLE = {CLIENT, ADMIN}
_FOR_PEOPLE = {ENGINE, *PEOPLE}

# An RPC without a row is refused to everybody.
ROLES: dict[str, set[str]] = {
    "FindMissingBlobs": _WRITERS,
    "WriteBlobs": _WRITERS,
    "QueryWriteStatus": _WRITERS,
    "ReadBlobs": _EVERYBODY,
    "CommitSnapshot": {ENGINE},
    "FindPrefix": {ENGINE},
    "AcquireLease": {ENGINE},
    "RenewLease": {ENGINE},
    "RenewLeases": {ENGINE},
    "ReleaseLease": {ENGINE},
    "WatchEvents": {ENGINE, CLIENT, ADMIN},
    "VerifyBlobs": PEOPLE,
    "CollectGarbage": {ADMIN},
    "GetCapabilities": _EVERYBODY,
    "GetStats": {ENGINE, CLIENT, ADMIN},
}
AGENT_ROLES: dict[str, set[str]] = {
    "ListAgents": _EVERYBODY,
    "GetAgent": _EVERYBODY,
    "UpdateAgent": _FOR_PEOPLE,
    "ForkAgent": _FOR_PEOPLE,
    "RollbackAgent": _FOR_PEOPLE,
    "DeleteAgent": _FOR_PEOPLE,
    "ListSnapshots": _EVERYBODY,
    "GetSnapshot": _EVERYBODY,
    "GetUsage": _FOR_PEOPLE,
    "PullAgent": {PEER, *_FOR_PEOPLE},
    "MoveAgent": {PEER, *_FOR_PEOPLE},
    "ClaimAgent": _FOR_PEOPLE,
    "ExportAgent": _FOR_PEOPLE,
    "ImportAgent": _FOR_PEOPLE,
}
PEER_ROLES: dict[str, set[str]] = {"ReloadPeers": {ADMIN}}
MOVING_ROLES: dict[str, set[str]] = {
    "OfferAgent": {PEER},
    "HandOverAgent": {PEER},
    "UndoMove": {PEER},
    "FenceAgent": {PEER},
}
_TABLES = (
    (SERVICE_NAME, ROLES),
    (AGENT_SERVICE_NAME, AGENT_ROLES),
    (PEER_SERVICE_NAME, PEER_ROLES),
    (MOVING_SERVICE_NAME, MOVING_ROLES),
)
ALLOWED_ROLES = {f"/{service}/{name}": frozenset(roles) for service, table in _TABLES for name, roles in table.items()}

# Frequent calls that change no memory. The audit lists every other call, and all calls of a peer.
_EVERYDAY = {
    *("FindMissingBlobs", "WriteBlobs", "QueryWriteStatus", "ReadBlobs", "FindPrefix", "VerifyBlobs"),
    *("AcquireLease", "RenewLease", "RenewLeases", "ReleaseLease", "WatchEvents", "GetCapabilities", "GetStats"),
    *("ListAgents", "GetAgent", "ListSnapshots", "GetSnapshot", "GetUsage"),
}
PRIVILEGED = frozenset(method for method in ALLOWED_ROLES if method.rpartition("/")[2] not in _EVERYDAY)
