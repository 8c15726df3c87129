from google.protobuf import duration_pb2 as _duration_pb2
from kvasir.cachestore.v1 import manifest_pb2 as _manifest_pb2
from kvasir.inference.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadTurnRequest(_message.Message):
    __slots__ = ("resume_token", "caller")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    caller: str
    def __init__(self, resume_token: _Optional[str] = ..., caller: _Optional[str] = ...) -> None: ...

class EndTurnRequest(_message.Message):
    __slots__ = ("resume_token",)
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    def __init__(self, resume_token: _Optional[str] = ...) -> None: ...

class EndTurnResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeTurnRequest(_message.Message):
    __slots__ = ("opening", "file", "frame", "stand", "commit")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    opening: TurnOpening
    file: TurnFile
    frame: bytes
    stand: TurnStand
    commit: TurnCommit
    def __init__(self, opening: _Optional[_Union[TurnOpening, _Mapping]] = ..., file: _Optional[_Union[TurnFile, _Mapping]] = ..., frame: _Optional[bytes] = ..., stand: _Optional[_Union[TurnStand, _Mapping]] = ..., commit: _Optional[_Union[TurnCommit, _Mapping]] = ...) -> None: ...

class TurnOpening(_message.Message):
    __slots__ = ("format", "surroundings", "request", "request_id", "seed", "max_tokens", "caller", "messages", "prompt_token_ids", "prompt_token_chars", "rewind_point_tokens", "parent_manifest", "is_brought", "continuation", "shortened", "shortening", "age", "first_token", "choices", "template_time_ms", "tools_order", "move_id", "is_text_own", "handed_over_by")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SURROUNDINGS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_CHARS_FIELD_NUMBER: _ClassVar[int]
    REWIND_POINT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENT_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    IS_BROUGHT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_FIELD_NUMBER: _ClassVar[int]
    SHORTENING_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_ORDER_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_TEXT_OWN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_BY_FIELD_NUMBER: _ClassVar[int]
    format: int
    surroundings: TurnSurroundings
    request: _inference_pb2.GenerateRequest
    request_id: str
    seed: int
    max_tokens: int
    caller: str
    messages: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Message]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_token_chars: _containers.RepeatedScalarFieldContainer[int]
    rewind_point_tokens: int
    parent_manifest: _manifest_pb2.Digest
    is_brought: bool
    continuation: _inference_pb2.Continuation
    shortened: _manifest_pb2.Shortened
    shortening: _inference_pb2.Shortening
    age: _duration_pb2.Duration
    first_token: _duration_pb2.Duration
    choices: _containers.RepeatedScalarFieldContainer[int]
    template_time_ms: int
    tools_order: _manifest_pb2.ToolsOrder
    move_id: str
    is_text_own: bool
    handed_over_by: str
    def __init__(self, format: _Optional[int] = ..., surroundings: _Optional[_Union[TurnSurroundings, _Mapping]] = ..., request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., caller: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_manifest_pb2.Message, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prompt_token_chars: _Optional[_Iterable[int]] = ..., rewind_point_tokens: _Optional[int] = ..., parent_manifest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ..., is_brought: bool = ..., continuation: _Optional[_Union[_inference_pb2.Continuation, str]] = ..., shortened: _Optional[_Union[_manifest_pb2.Shortened, _Mapping]] = ..., shortening: _Optional[_Union[_inference_pb2.Shortening, _Mapping]] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., first_token: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., choices: _Optional[_Iterable[int]] = ..., template_time_ms: _Optional[int] = ..., tools_order: _Optional[_Union[_manifest_pb2.ToolsOrder, _Mapping]] = ..., move_id: _Optional[str] = ..., is_text_own: bool = ..., handed_over_by: _Optional[str] = ...) -> None: ...

class TurnSurroundings(_message.Message):
    __slots__ = ("kv_identity_hash", "tokenizer_digest", "template_digest", "device", "compute_type", "cell_tokens", "version", "sampling_defaults")
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CELL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    kv_identity_hash: str
    tokenizer_digest: str
    template_digest: str
    device: str
    compute_type: str
    cell_tokens: int
    version: str
    sampling_defaults: str
    def __init__(self, kv_identity_hash: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., device: _Optional[str] = ..., compute_type: _Optional[str] = ..., cell_tokens: _Optional[int] = ..., version: _Optional[str] = ..., sampling_defaults: _Optional[str] = ...) -> None: ...

class TurnFile(_message.Message):
    __slots__ = ("choice", "digest")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    choice: int
    digest: _manifest_pb2.Digest
    def __init__(self, choice: _Optional[int] = ..., digest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ...) -> None: ...

class TurnStand(_message.Message):
    __slots__ = ("choice", "reply_token_ids", "computed_tokens", "cached_tokens", "shareable_tokens", "sampler_key", "rewind_points", "groups", "told_chars", "spent", "files")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REPLY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHAREABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_KEY_FIELD_NUMBER: _ClassVar[int]
    REWIND_POINTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOLD_CHARS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reply_token_ids: _containers.RepeatedScalarFieldContainer[int]
    computed_tokens: int
    cached_tokens: int
    shareable_tokens: int
    sampler_key: _containers.RepeatedScalarFieldContainer[int]
    rewind_points: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedCompositeFieldContainer[TurnGroup]
    told_chars: int
    spent: _inference_pb2.Timings
    files: int
    def __init__(self, choice: _Optional[int] = ..., reply_token_ids: _Optional[_Iterable[int]] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., shareable_tokens: _Optional[int] = ..., sampler_key: _Optional[_Iterable[int]] = ..., rewind_points: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[_Union[TurnGroup, _Mapping]]] = ..., told_chars: _Optional[int] = ..., spent: _Optional[_Union[_inference_pb2.Timings, _Mapping]] = ..., files: _Optional[int] = ...) -> None: ...

class TurnGroup(_message.Message):
    __slots__ = ("window", "first_block")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    window: int
    first_block: int
    def __init__(self, window: _Optional[int] = ..., first_block: _Optional[int] = ...) -> None: ...

class TurnCommit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeTurnResponse(_message.Message):
    __slots__ = ("opened", "prepared", "taken")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    opened: TurnOpened
    prepared: TurnPrepared
    taken: TurnTaken
    def __init__(self, opened: _Optional[_Union[TurnOpened, _Mapping]] = ..., prepared: _Optional[_Union[TurnPrepared, _Mapping]] = ..., taken: _Optional[_Union[TurnTaken, _Mapping]] = ...) -> None: ...

class TurnOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TurnPrepared(_message.Message):
    __slots__ = ("resume_token", "expires_in")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    expires_in: _duration_pb2.Duration
    def __init__(self, resume_token: _Optional[str] = ..., expires_in: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TurnTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandOverTurnRequest(_message.Message):
    __slots__ = ("peer", "agent_id", "request_id")
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    peer: str
    agent_id: str
    request_id: str
    def __init__(self, peer: _Optional[str] = ..., agent_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class HandOverTurnResponse(_message.Message):
    __slots__ = ("request_id", "gap", "ahead_bytes", "tail_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    gap: _duration_pb2.Duration
    ahead_bytes: int
    tail_bytes: int
    def __init__(self, request_id: _Optional[str] = ..., gap: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., ahead_bytes: _Optional[int] = ..., tail_bytes: _Optional[int] = ...) -> None: ...
