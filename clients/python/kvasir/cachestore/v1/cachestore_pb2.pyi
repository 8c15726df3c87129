from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvasir.cachestore.v1 import manifest_pb2 as _manifest_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlobKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOB_KIND_UNSPECIFIED: _ClassVar[BlobKind]
    BLOB_KIND_TENSORS: _ClassVar[BlobKind]
    BLOB_KIND_MANIFEST: _ClassVar[BlobKind]

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_TURN: _ClassVar[Origin]
    ORIGIN_FORK: _ClassVar[Origin]
    ORIGIN_ROLLBACK: _ClassVar[Origin]
    ORIGIN_IMPORT: _ClassVar[Origin]
    ORIGIN_PULL: _ClassVar[Origin]
    ORIGIN_MOVE: _ClassVar[Origin]

class OwnerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWNER_STATE_UNSPECIFIED: _ClassVar[OwnerState]
    OWNER_STATE_OWNED: _ClassVar[OwnerState]
    OWNER_STATE_MOVING: _ClassVar[OwnerState]
    OWNER_STATE_MOVED: _ClassVar[OwnerState]
    OWNER_STATE_ARRIVING: _ClassVar[OwnerState]
BLOB_KIND_UNSPECIFIED: BlobKind
BLOB_KIND_TENSORS: BlobKind
BLOB_KIND_MANIFEST: BlobKind
ORIGIN_UNSPECIFIED: Origin
ORIGIN_TURN: Origin
ORIGIN_FORK: Origin
ORIGIN_ROLLBACK: Origin
ORIGIN_IMPORT: Origin
ORIGIN_PULL: Origin
ORIGIN_MOVE: Origin
OWNER_STATE_UNSPECIFIED: OwnerState
OWNER_STATE_OWNED: OwnerState
OWNER_STATE_MOVING: OwnerState
OWNER_STATE_MOVED: OwnerState
OWNER_STATE_ARRIVING: OwnerState

class BlobFrame(_message.Message):
    __slots__ = ("digest", "kind", "offset", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: _manifest_pb2.Digest
    kind: BlobKind
    offset: int
    data: bytes
    def __init__(self, digest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ..., kind: _Optional[_Union[BlobKind, str]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FindMissingBlobsRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    def __init__(self, digests: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ...) -> None: ...

class FindMissingBlobsResponse(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    def __init__(self, missing: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ...) -> None: ...

class WriteBlobsRequest(_message.Message):
    __slots__ = ("frame", "handed", "more")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    HANDED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    frame: BlobFrame
    handed: str
    more: _containers.RepeatedCompositeFieldContainer[BlobFrame]
    def __init__(self, frame: _Optional[_Union[BlobFrame, _Mapping]] = ..., handed: _Optional[str] = ..., more: _Optional[_Iterable[_Union[BlobFrame, _Mapping]]] = ...) -> None: ...

class WriteBlobsResponse(_message.Message):
    __slots__ = ("digest", "existed", "more")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    digest: _manifest_pb2.Digest
    existed: bool
    more: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    def __init__(self, digest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ..., existed: bool = ..., more: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ...) -> None: ...

class QueryWriteStatusRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: _manifest_pb2.Digest
    def __init__(self, digest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ...) -> None: ...

class QueryWriteStatusResponse(_message.Message):
    __slots__ = ("received_bytes", "is_complete")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    is_complete: bool
    def __init__(self, received_bytes: _Optional[int] = ..., is_complete: bool = ...) -> None: ...

class ReadBlobsRequest(_message.Message):
    __slots__ = ("digests", "first_offset", "takes_several")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TAKES_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    first_offset: int
    takes_several: bool
    def __init__(self, digests: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ..., first_offset: _Optional[int] = ..., takes_several: bool = ...) -> None: ...

class ReadBlobsResponse(_message.Message):
    __slots__ = ("frame", "more")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    frame: BlobFrame
    more: _containers.RepeatedCompositeFieldContainer[BlobFrame]
    def __init__(self, frame: _Optional[_Union[BlobFrame, _Mapping]] = ..., more: _Optional[_Iterable[_Union[BlobFrame, _Mapping]]] = ...) -> None: ...

class SnapshotVersion(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "version", "manifest", "parent_version", "token_count", "created_at", "total_bytes", "origin", "origin_detail", "request_id", "is_brought", "base_version", "context_tokens", "is_text_own")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_DETAIL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IS_BROUGHT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_TEXT_OWN_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    version: int
    manifest: _manifest_pb2.Digest
    parent_version: int
    token_count: int
    created_at: _timestamp_pb2.Timestamp
    total_bytes: int
    origin: Origin
    origin_detail: str
    request_id: str
    is_brought: bool
    base_version: int
    context_tokens: int
    is_text_own: bool
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., version: _Optional[int] = ..., manifest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ..., parent_version: _Optional[int] = ..., token_count: _Optional[int] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., total_bytes: _Optional[int] = ..., origin: _Optional[_Union[Origin, str]] = ..., origin_detail: _Optional[str] = ..., request_id: _Optional[str] = ..., is_brought: bool = ..., base_version: _Optional[int] = ..., context_tokens: _Optional[int] = ..., is_text_own: bool = ...) -> None: ...

class CommitSnapshotRequest(_message.Message):
    __slots__ = ("agent_id", "manifest", "expected_version", "lease", "is_brought", "parent_manifest", "base_version", "handed_over_by", "awaited")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    IS_BROUGHT_FIELD_NUMBER: _ClassVar[int]
    PARENT_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_BY_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    manifest: _manifest_pb2.Digest
    expected_version: int
    lease: LeaseToken
    is_brought: bool
    parent_manifest: _manifest_pb2.Digest
    base_version: int
    handed_over_by: str
    awaited: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    def __init__(self, agent_id: _Optional[str] = ..., manifest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ..., expected_version: _Optional[int] = ..., lease: _Optional[_Union[LeaseToken, _Mapping]] = ..., is_brought: bool = ..., parent_manifest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ..., base_version: _Optional[int] = ..., handed_over_by: _Optional[str] = ..., awaited: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ...) -> None: ...

class CommitSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotVersion
    def __init__(self, snapshot: _Optional[_Union[SnapshotVersion, _Mapping]] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "version")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    version: int
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("snapshot", "manifest_bytes")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotVersion
    manifest_bytes: bytes
    def __init__(self, snapshot: _Optional[_Union[SnapshotVersion, _Mapping]] = ..., manifest_bytes: _Optional[bytes] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "page_size", "page_token", "has_had")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HAS_HAD_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    page_size: int
    page_token: str
    has_had: str
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., has_had: _Optional[str] = ...) -> None: ...

class ListSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots", "next_page_token", "has_had")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HAS_HAD_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotVersion]
    next_page_token: str
    has_had: bool
    def __init__(self, snapshots: _Optional[_Iterable[_Union[SnapshotVersion, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., has_had: bool = ...) -> None: ...

class Agent(_message.Message):
    __slots__ = ("agent_id", "labels", "is_pinned", "retained_versions", "created_at", "used_at", "lines", "expires_at", "ownership")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    USED_AT_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIP_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    labels: _containers.ScalarMap[str, str]
    is_pinned: bool
    retained_versions: int
    created_at: _timestamp_pb2.Timestamp
    used_at: _timestamp_pb2.Timestamp
    lines: _containers.RepeatedCompositeFieldContainer[SnapshotVersion]
    expires_at: _timestamp_pb2.Timestamp
    ownership: Ownership
    def __init__(self, agent_id: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., is_pinned: bool = ..., retained_versions: _Optional[int] = ..., created_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., used_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., lines: _Optional[_Iterable[_Union[SnapshotVersion, _Mapping]]] = ..., expires_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., ownership: _Optional[_Union[Ownership, _Mapping]] = ...) -> None: ...

class Ownership(_message.Message):
    __slots__ = ("state", "generation", "peer", "since", "move_id", "given_by")
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BY_FIELD_NUMBER: _ClassVar[int]
    state: OwnerState
    generation: int
    peer: str
    since: _timestamp_pb2.Timestamp
    move_id: str
    given_by: str
    def __init__(self, state: _Optional[_Union[OwnerState, str]] = ..., generation: _Optional[int] = ..., peer: _Optional[str] = ..., since: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., move_id: _Optional[str] = ..., given_by: _Optional[str] = ...) -> None: ...

class ListAgentsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "name_prefix", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    name_prefix: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., name_prefix: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListAgentsResponse(_message.Message):
    __slots__ = ("agents", "next_page_token")
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedCompositeFieldContainer[Agent]
    next_page_token: str
    def __init__(self, agents: _Optional[_Iterable[_Union[Agent, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetAgentRequest(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class GetAgentResponse(_message.Message):
    __slots__ = ("agent",)
    AGENT_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ...) -> None: ...

class UpdateAgentRequest(_message.Message):
    __slots__ = ("agent", "update_mask")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class UpdateAgentResponse(_message.Message):
    __slots__ = ("agent",)
    AGENT_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ...) -> None: ...

class ForkAgentRequest(_message.Message):
    __slots__ = ("source_agent_id", "agent_id", "kv_identity_hash", "version")
    SOURCE_AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    source_agent_id: str
    agent_id: str
    kv_identity_hash: str
    version: int
    def __init__(self, source_agent_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ForkAgentResponse(_message.Message):
    __slots__ = ("agent",)
    AGENT_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ...) -> None: ...

class RollbackAgentRequest(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "version", "expected_version")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    version: int
    expected_version: int
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., version: _Optional[int] = ..., expected_version: _Optional[int] = ...) -> None: ...

class RollbackAgentResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotVersion
    def __init__(self, snapshot: _Optional[_Union[SnapshotVersion, _Mapping]] = ...) -> None: ...

class DeleteAgentRequest(_message.Message):
    __slots__ = ("agent_id", "force")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    force: bool
    def __init__(self, agent_id: _Optional[str] = ..., force: bool = ...) -> None: ...

class DeleteAgentResponse(_message.Message):
    __slots__ = ("bytes_gone_by", "unshared_bytes")
    BYTES_GONE_BY_FIELD_NUMBER: _ClassVar[int]
    UNSHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes_gone_by: _timestamp_pb2.Timestamp
    unshared_bytes: int
    def __init__(self, bytes_gone_by: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., unshared_bytes: _Optional[int] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("agent_count", "snapshot_count", "blob_count", "blob_bytes", "shared_blob_count", "shared_bytes", "quota_bytes", "unreferenced_bytes", "damaged_blob_count")
    AGENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREFERENCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    agent_count: int
    snapshot_count: int
    blob_count: int
    blob_bytes: int
    shared_blob_count: int
    shared_bytes: int
    quota_bytes: int
    unreferenced_bytes: int
    damaged_blob_count: int
    def __init__(self, agent_count: _Optional[int] = ..., snapshot_count: _Optional[int] = ..., blob_count: _Optional[int] = ..., blob_bytes: _Optional[int] = ..., shared_blob_count: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., unreferenced_bytes: _Optional[int] = ..., damaged_blob_count: _Optional[int] = ...) -> None: ...

class FindPrefixRequest(_message.Message):
    __slots__ = ("kv_identity_hash", "block_hashes", "groups")
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    kv_identity_hash: str
    block_hashes: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kv_identity_hash: _Optional[str] = ..., block_hashes: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class FindPrefixResponse(_message.Message):
    __slots__ = ("blocks", "windows", "tokens")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    windows: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.WindowBlocks]
    tokens: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[_manifest_pb2.WindowBlocks, _Mapping]]] = ..., tokens: _Optional[int] = ...) -> None: ...

class LeaseToken(_message.Message):
    __slots__ = ("owner", "generation")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    owner: str
    generation: int
    def __init__(self, owner: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "owner", "ttl", "begins_anew", "asks")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    BEGINS_ANEW_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    owner: str
    ttl: _duration_pb2.Duration
    begins_anew: bool
    asks: bool
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., owner: _Optional[str] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., begins_anew: bool = ..., asks: bool = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("lease", "expires_at", "head_version", "head")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    HEAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseToken
    expires_at: _timestamp_pb2.Timestamp
    head_version: int
    head: SnapshotVersion
    def __init__(self, lease: _Optional[_Union[LeaseToken, _Mapping]] = ..., expires_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., head_version: _Optional[int] = ..., head: _Optional[_Union[SnapshotVersion, _Mapping]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "lease", "ttl")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    lease: LeaseToken
    ttl: _duration_pb2.Duration
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., lease: _Optional[_Union[LeaseToken, _Mapping]] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("expires_at",)
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, expires_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class HeldLease(_message.Message):
    __slots__ = ("agent_id", "generation")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    generation: int
    def __init__(self, agent_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("owner", "kv_identity_hash", "leases", "ttl")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    owner: str
    kv_identity_hash: str
    leases: _containers.RepeatedCompositeFieldContainer[HeldLease]
    ttl: _duration_pb2.Duration
    def __init__(self, owner: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("lost", "wanted")
    LOST_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedCompositeFieldContainer[HeldLease]
    wanted: _containers.RepeatedCompositeFieldContainer[HeldLease]
    def __init__(self, lost: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ..., wanted: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "lease")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    lease: LeaseToken
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., lease: _Optional[_Union[LeaseToken, _Mapping]] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullAgentRequest(_message.Message):
    __slots__ = ("peer", "agent_id", "local_agent_id", "kv_identity_hash", "dry_run", "to_peer", "only_bytes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    TO_PEER_FIELD_NUMBER: _ClassVar[int]
    ONLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    agent_id: str
    local_agent_id: str
    kv_identity_hash: str
    dry_run: bool
    to_peer: str
    only_bytes: bool
    def __init__(self, peer: _Optional[str] = ..., agent_id: _Optional[str] = ..., local_agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., dry_run: bool = ..., to_peer: _Optional[str] = ..., only_bytes: bool = ...) -> None: ...

class PullAgentResponse(_message.Message):
    __slots__ = ("progress", "done")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    progress: TransferProgress
    done: SnapshotVersion
    def __init__(self, progress: _Optional[_Union[TransferProgress, _Mapping]] = ..., done: _Optional[_Union[SnapshotVersion, _Mapping]] = ...) -> None: ...

class MoveAgentRequest(_message.Message):
    __slots__ = ("agent_id", "from_peer", "to_peer", "dry_run", "move_id")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    TO_PEER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    from_peer: str
    to_peer: str
    dry_run: bool
    move_id: str
    def __init__(self, agent_id: _Optional[str] = ..., from_peer: _Optional[str] = ..., to_peer: _Optional[str] = ..., dry_run: bool = ..., move_id: _Optional[str] = ...) -> None: ...

class MoveAgentResponse(_message.Message):
    __slots__ = ("progress", "waiting", "done")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    progress: TransferProgress
    waiting: MoveWaiting
    done: Agent
    def __init__(self, progress: _Optional[_Union[TransferProgress, _Mapping]] = ..., waiting: _Optional[_Union[MoveWaiting, _Mapping]] = ..., done: _Optional[_Union[Agent, _Mapping]] = ...) -> None: ...

class MoveWaiting(_message.Message):
    __slots__ = ("lease_owner",)
    LEASE_OWNER_FIELD_NUMBER: _ClassVar[int]
    lease_owner: str
    def __init__(self, lease_owner: _Optional[str] = ...) -> None: ...

class ClaimAgentRequest(_message.Message):
    __slots__ = ("agent_id", "force")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    force: bool
    def __init__(self, agent_id: _Optional[str] = ..., force: bool = ...) -> None: ...

class ClaimAgentResponse(_message.Message):
    __slots__ = ("agent",)
    AGENT_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ...) -> None: ...

class OfferAgentRequest(_message.Message):
    __slots__ = ("agent_id", "move_id", "generation")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    move_id: str
    generation: int
    def __init__(self, agent_id: _Optional[str] = ..., move_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class OfferAgentResponse(_message.Message):
    __slots__ = ("agent", "generation")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    generation: int
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class HandOverAgentRequest(_message.Message):
    __slots__ = ("agent_id", "move_id", "generation")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    move_id: str
    generation: int
    def __init__(self, agent_id: _Optional[str] = ..., move_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class HandOverAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndoMoveRequest(_message.Message):
    __slots__ = ("agent_id", "move_id")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    move_id: str
    def __init__(self, agent_id: _Optional[str] = ..., move_id: _Optional[str] = ...) -> None: ...

class UndoMoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FenceAgentRequest(_message.Message):
    __slots__ = ("agent_id", "generation")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    generation: int
    def __init__(self, agent_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class FenceAgentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferProgress(_message.Message):
    __slots__ = ("blobs_done", "blobs_total", "bytes_done", "bytes_total", "blobs_skipped")
    BLOBS_DONE_FIELD_NUMBER: _ClassVar[int]
    BLOBS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOBS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    blobs_done: int
    blobs_total: int
    bytes_done: int
    bytes_total: int
    blobs_skipped: int
    def __init__(self, blobs_done: _Optional[int] = ..., blobs_total: _Optional[int] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., blobs_skipped: _Optional[int] = ...) -> None: ...

class ExportAgentRequest(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "version")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    version: int
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ExportAgentResponse(_message.Message):
    __slots__ = ("data", "archive_size_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    archive_size_bytes: int
    def __init__(self, data: _Optional[bytes] = ..., archive_size_bytes: _Optional[int] = ...) -> None: ...

class ImportAgentRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: ImportAgentHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[ImportAgentHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ImportAgentHeader(_message.Message):
    __slots__ = ("agent_id", "replace")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    replace: bool
    def __init__(self, agent_id: _Optional[str] = ..., replace: bool = ...) -> None: ...

class ImportAgentResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotVersion
    def __init__(self, snapshot: _Optional[_Union[SnapshotVersion, _Mapping]] = ...) -> None: ...

class EventCursor(_message.Message):
    __slots__ = ("incarnation", "sequence")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    sequence: int
    def __init__(self, incarnation: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: EventCursor
    def __init__(self, after: _Optional[_Union[EventCursor, _Mapping]] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("cursor", "at", "committed", "agent_deleted", "blob_damaged", "lost", "agent_updated", "started", "lease_wanted")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    AGENT_DELETED_FIELD_NUMBER: _ClassVar[int]
    BLOB_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    AGENT_UPDATED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_WANTED_FIELD_NUMBER: _ClassVar[int]
    cursor: EventCursor
    at: _timestamp_pb2.Timestamp
    committed: SnapshotVersion
    agent_deleted: AgentDeleted
    blob_damaged: BlobDamaged
    lost: EventsLost
    agent_updated: AgentUpdated
    started: WatchStarted
    lease_wanted: LeaseWanted
    def __init__(self, cursor: _Optional[_Union[EventCursor, _Mapping]] = ..., at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., committed: _Optional[_Union[SnapshotVersion, _Mapping]] = ..., agent_deleted: _Optional[_Union[AgentDeleted, _Mapping]] = ..., blob_damaged: _Optional[_Union[BlobDamaged, _Mapping]] = ..., lost: _Optional[_Union[EventsLost, _Mapping]] = ..., agent_updated: _Optional[_Union[AgentUpdated, _Mapping]] = ..., started: _Optional[_Union[WatchStarted, _Mapping]] = ..., lease_wanted: _Optional[_Union[LeaseWanted, _Mapping]] = ...) -> None: ...

class AgentDeleted(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class AgentUpdated(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class LeaseWanted(_message.Message):
    __slots__ = ("agent_id", "kv_identity_hash", "takes_back")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    TAKES_BACK_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    kv_identity_hash: str
    takes_back: bool
    def __init__(self, agent_id: _Optional[str] = ..., kv_identity_hash: _Optional[str] = ..., takes_back: bool = ...) -> None: ...

class BlobDamaged(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: _manifest_pb2.Digest
    def __init__(self, digest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ...) -> None: ...

class EventsLost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStarted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyBlobsRequest(_message.Message):
    __slots__ = ("agent_id",)
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    def __init__(self, agent_id: _Optional[str] = ...) -> None: ...

class VerifyBlobsResponse(_message.Message):
    __slots__ = ("blobs_checked", "blobs_total", "damaged", "repaired")
    BLOBS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    BLOBS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    blobs_checked: int
    blobs_total: int
    damaged: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    repaired: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Digest]
    def __init__(self, blobs_checked: _Optional[int] = ..., blobs_total: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ..., repaired: _Optional[_Iterable[_Union[_manifest_pb2.Digest, _Mapping]]] = ...) -> None: ...

class CollectGarbageRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: bool = ...) -> None: ...

class CollectGarbageResponse(_message.Message):
    __slots__ = ("blobs_marked", "blobs_swept", "bytes_freed")
    BLOBS_MARKED_FIELD_NUMBER: _ClassVar[int]
    BLOBS_SWEPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FREED_FIELD_NUMBER: _ClassVar[int]
    blobs_marked: int
    blobs_swept: int
    bytes_freed: int
    def __init__(self, blobs_marked: _Optional[int] = ..., blobs_swept: _Optional[int] = ..., bytes_freed: _Optional[int] = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("version", "manifest_format", "block_tokens", "max_frame_bytes", "max_blob_bytes", "max_digests_per_request", "namespace", "roles", "peers", "features")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_DIGESTS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    version: str
    manifest_format: int
    block_tokens: int
    max_frame_bytes: int
    max_blob_bytes: int
    max_digests_per_request: int
    namespace: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedScalarFieldContainer[str]
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., manifest_format: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., max_blob_bytes: _Optional[int] = ..., max_digests_per_request: _Optional[int] = ..., namespace: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[str]] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("agent_count", "snapshot_count", "blob_count", "blob_bytes", "logical_bytes", "quota_bytes", "reserved_bytes", "free_disk_bytes", "unreferenced_bytes", "damaged_blob_count", "counters", "written_today_bytes", "write_budget_bytes", "scrub", "is_disk_full")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    AGENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREFERENCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TODAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    IS_DISK_FULL_FIELD_NUMBER: _ClassVar[int]
    agent_count: int
    snapshot_count: int
    blob_count: int
    blob_bytes: int
    logical_bytes: int
    quota_bytes: int
    reserved_bytes: int
    free_disk_bytes: int
    unreferenced_bytes: int
    damaged_blob_count: int
    counters: _containers.ScalarMap[str, int]
    written_today_bytes: int
    write_budget_bytes: int
    scrub: ScrubStatus
    is_disk_full: bool
    def __init__(self, agent_count: _Optional[int] = ..., snapshot_count: _Optional[int] = ..., blob_count: _Optional[int] = ..., blob_bytes: _Optional[int] = ..., logical_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., free_disk_bytes: _Optional[int] = ..., unreferenced_bytes: _Optional[int] = ..., damaged_blob_count: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., written_today_bytes: _Optional[int] = ..., write_budget_bytes: _Optional[int] = ..., scrub: _Optional[_Union[ScrubStatus, _Mapping]] = ..., is_disk_full: bool = ...) -> None: ...

class ScrubStatus(_message.Message):
    __slots__ = ("began_at", "ended_at", "blobs_checked", "bytes_checked", "blobs_damaged", "blobs_repaired", "bytes_per_s")
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    BLOBS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    BLOBS_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    BLOBS_REPAIRED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    began_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    blobs_checked: int
    bytes_checked: int
    blobs_damaged: int
    blobs_repaired: int
    bytes_per_s: int
    def __init__(self, began_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., blobs_checked: _Optional[int] = ..., bytes_checked: _Optional[int] = ..., blobs_damaged: _Optional[int] = ..., blobs_repaired: _Optional[int] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...
