from kvasir.cachestore.v1 import identity_pb2 as _identity_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Digest(_message.Message):
    __slots__ = ("hash", "size_bytes")
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    hash: str
    size_bytes: int
    def __init__(self, hash: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("format", "kv_identity", "tokenizer_digest", "template_digest", "token_ids", "text", "token_chars", "messages", "blocks", "tail", "states", "shareable_tokens", "parent_manifest", "turn", "created_unix_ms", "windows", "shortened", "template_time_ms", "tools_order", "computed", "asleep", "pending")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CHARS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    SHAREABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENT_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_ORDER_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    format: int
    kv_identity: _identity_pb2.KvIdentity
    tokenizer_digest: str
    template_digest: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    token_chars: _containers.RepeatedScalarFieldContainer[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    blocks: _containers.RepeatedCompositeFieldContainer[Digest]
    tail: Digest
    states: _containers.RepeatedCompositeFieldContainer[StatePoint]
    shareable_tokens: int
    parent_manifest: str
    turn: Turn
    created_unix_ms: int
    windows: _containers.RepeatedCompositeFieldContainer[WindowBlocks]
    shortened: Shortened
    template_time_ms: int
    tools_order: ToolsOrder
    computed: Computed
    asleep: Asleep
    pending: PendingToken
    def __init__(self, format: _Optional[int] = ..., kv_identity: _Optional[_Union[_identity_pb2.KvIdentity, _Mapping]] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., token_chars: _Optional[_Iterable[int]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[Digest, _Mapping]]] = ..., tail: _Optional[_Union[Digest, _Mapping]] = ..., states: _Optional[_Iterable[_Union[StatePoint, _Mapping]]] = ..., shareable_tokens: _Optional[int] = ..., parent_manifest: _Optional[str] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., created_unix_ms: _Optional[int] = ..., windows: _Optional[_Iterable[_Union[WindowBlocks, _Mapping]]] = ..., shortened: _Optional[_Union[Shortened, _Mapping]] = ..., template_time_ms: _Optional[int] = ..., tools_order: _Optional[_Union[ToolsOrder, _Mapping]] = ..., computed: _Optional[_Union[Computed, _Mapping]] = ..., asleep: _Optional[_Union[Asleep, _Mapping]] = ..., pending: _Optional[_Union[PendingToken, _Mapping]] = ...) -> None: ...

class PendingToken(_message.Message):
    __slots__ = ("id", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("decoded",)
    DECODED_FIELD_NUMBER: _ClassVar[int]
    decoded: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, decoded: _Optional[_Iterable[int]] = ...) -> None: ...

class Asleep(_message.Message):
    __slots__ = ("files", "wake_ms")
    FILES_FIELD_NUMBER: _ClassVar[int]
    WAKE_MS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[Digest]
    wake_ms: int
    def __init__(self, files: _Optional[_Iterable[_Union[Digest, _Mapping]]] = ..., wake_ms: _Optional[int] = ...) -> None: ...

class ToolsOrder(_message.Message):
    __slots__ = ("set_hash", "places")
    SET_HASH_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    set_hash: str
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, set_hash: _Optional[str] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Shortened(_message.Message):
    __slots__ = ("dropped_messages", "has_summary", "is_after_turn", "dropped_behind_question")
    DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HAS_SUMMARY_FIELD_NUMBER: _ClassVar[int]
    IS_AFTER_TURN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BEHIND_QUESTION_FIELD_NUMBER: _ClassVar[int]
    dropped_messages: int
    has_summary: bool
    is_after_turn: bool
    dropped_behind_question: int
    def __init__(self, dropped_messages: _Optional[int] = ..., has_summary: bool = ..., is_after_turn: bool = ..., dropped_behind_question: _Optional[int] = ...) -> None: ...

class WindowBlocks(_message.Message):
    __slots__ = ("window", "first_block", "blocks", "tail")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    window: int
    first_block: int
    blocks: _containers.RepeatedCompositeFieldContainer[Digest]
    tail: Digest
    def __init__(self, window: _Optional[int] = ..., first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Digest, _Mapping]]] = ..., tail: _Optional[_Union[Digest, _Mapping]] = ...) -> None: ...

class StatePoint(_message.Message):
    __slots__ = ("tokens", "digest")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    digest: Digest
    def __init__(self, tokens: _Optional[int] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "is_reply", "reasoning", "is_note")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    IS_REPLY_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    IS_NOTE_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    is_reply: bool
    reasoning: str
    is_note: bool
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., is_reply: bool = ..., reasoning: _Optional[str] = ..., is_note: bool = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "prompt_chars", "finish_reason", "input_digest", "reply", "matched_stop")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHARS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    INPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    prompt_chars: int
    finish_reason: str
    input_digest: str
    reply: str
    matched_stop: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., prompt_chars: _Optional[int] = ..., finish_reason: _Optional[str] = ..., input_digest: _Optional[str] = ..., reply: _Optional[str] = ..., matched_stop: _Optional[str] = ...) -> None: ...
