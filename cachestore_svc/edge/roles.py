"""Who may call what of the cache store: one row per RPC."""

from kvasir.credentials import ADMIN, CLIENT, ENGINE, PEER

SERVICE_NAME = "kvasir.cachestore.v1.CacheStoreService"

_EVERYBODY = {ENGINE, CLIENT, PEER, ADMIN}
# A peer reads what it was given the token for, and nothing else: it neither writes nor prolongs lives.
_WRITERS = {ENGINE, CLIENT}
PEOPLE = {CLIENT, ADMIN}

# An RPC without a row is refused to everybody.
ROLES: dict[str, set[str]] = {
    "FindMissingBlobs": _WRITERS,
    "WriteBlobs": _WRITERS,
    "QueryWriteStatus": _WRITERS,
    "ReadBlobs": _EVERYBODY,
    "CommitSnapshot": {ENGINE},
    "GetSnapshot": _EVERYBODY,
    "ListSnapshots": _EVERYBODY,
    "ListAgents": _EVERYBODY,
    "GetAgent": _EVERYBODY,
    "UpdateAgent": PEOPLE,
    "ForkAgent": PEOPLE,
    "RollbackAgent": PEOPLE,
    "DeleteAgent": PEOPLE,
    "FindPrefix": {ENGINE},
    "AcquireLease": {ENGINE},
    "RenewLease": {ENGINE},
    "RenewLeases": {ENGINE},
    "ReleaseLease": {ENGINE},
    "PullAgent": PEOPLE,
    "ExportAgent": PEOPLE,
    "ImportAgent": PEOPLE,
    "WatchEvents": {ENGINE, CLIENT, ADMIN},
    "VerifyBlobs": PEOPLE,
    "CollectGarbage": {ADMIN},
    "GetCapabilities": _EVERYBODY,
    "GetStats": {ENGINE, CLIENT, ADMIN},
}
ALLOWED_ROLES = {f"/{SERVICE_NAME}/{name}": frozenset(roles) for name, roles in ROLES.items()}
