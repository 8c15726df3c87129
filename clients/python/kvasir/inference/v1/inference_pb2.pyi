from google.protobuf import duration_pb2 as _duration_pb2
from kvasir.cachestore.v1 import identity_pb2 as _identity_pb2
from kvasir.cachestore.v1 import manifest_pb2 as _manifest_pb2
from kvasir.common.v1 import message_pb2 as _message_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ThinkingMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    THINKING_MODE_UNSPECIFIED: _ClassVar[ThinkingMode]
    THINKING_MODE_ON: _ClassVar[ThinkingMode]
    THINKING_MODE_OFF: _ClassVar[ThinkingMode]

class ToolChoiceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_KIND_UNSPECIFIED: _ClassVar[ToolChoiceKind]
    TOOL_CHOICE_KIND_REQUIRED: _ClassVar[ToolChoiceKind]
    TOOL_CHOICE_KIND_NAMED: _ClassVar[ToolChoiceKind]
    TOOL_CHOICE_KIND_NONE: _ClassVar[ToolChoiceKind]

class OnFullPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_FULL_POLICY_UNSPECIFIED: _ClassVar[OnFullPolicy]
    ON_FULL_POLICY_REFUSE: _ClassVar[OnFullPolicy]
    ON_FULL_POLICY_DROP_OLDEST: _ClassVar[OnFullPolicy]
    ON_FULL_POLICY_SUMMARIZE: _ClassVar[OnFullPolicy]

class MemoryMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_MODE_UNSPECIFIED: _ClassVar[MemoryMode]
    MEMORY_MODE_READ_WRITE: _ClassVar[MemoryMode]
    MEMORY_MODE_READ_ONLY: _ClassVar[MemoryMode]
    MEMORY_MODE_NONE: _ClassVar[MemoryMode]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BACKGROUND: _ClassVar[Priority]

class Continuation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTINUATION_UNSPECIFIED: _ClassVar[Continuation]
    CONTINUATION_NEW: _ClassVar[Continuation]
    CONTINUATION_EXTENDED: _ClassVar[Continuation]
    CONTINUATION_REWOUND: _ClassVar[Continuation]
    CONTINUATION_REPLACED: _ClassVar[Continuation]
    CONTINUATION_BRANCHED: _ClassVar[Continuation]
    CONTINUATION_UNDECIDED: _ClassVar[Continuation]

class CacheSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_SOURCE_UNSPECIFIED: _ClassVar[CacheSource]
    CACHE_SOURCE_COLD: _ClassVar[CacheSource]
    CACHE_SOURCE_HOT: _ClassVar[CacheSource]
    CACHE_SOURCE_WARM: _ClassVar[CacheSource]
    CACHE_SOURCE_SHARED: _ClassVar[CacheSource]
    CACHE_SOURCE_REPLAY: _ClassVar[CacheSource]
    CACHE_SOURCE_WOKEN: _ClassVar[CacheSource]

class PrefixMatch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_MATCH_UNSPECIFIED: _ClassVar[PrefixMatch]
    PREFIX_MATCH_NONE: _ClassVar[PrefixMatch]
    PREFIX_MATCH_EXACT: _ClassVar[PrefixMatch]
    PREFIX_MATCH_EXTEND: _ClassVar[PrefixMatch]
    PREFIX_MATCH_DIVERGE: _ClassVar[PrefixMatch]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_NEW_AGENT: _ClassVar[MissReason]
    MISS_REASON_TEXT_DIFFERS: _ClassVar[MissReason]
    MISS_REASON_KV_IDENTITY_DIFFERS: _ClassVar[MissReason]
    MISS_REASON_STORE_UNREACHABLE: _ClassVar[MissReason]
    MISS_REASON_STORE_TIMEOUT: _ClassVar[MissReason]
    MISS_REASON_STORE_REFUSED: _ClassVar[MissReason]
    MISS_REASON_BLOB_MISSING: _ClassVar[MissReason]
    MISS_REASON_BLOB_DAMAGED: _ClassVar[MissReason]
    MISS_REASON_MANIFEST_INVALID: _ClassVar[MissReason]
    MISS_REASON_NO_MEMORY: _ClassVar[MissReason]
    MISS_REASON_NO_STATE_POINT: _ClassVar[MissReason]
    MISS_REASON_COMPUTED: _ClassVar[MissReason]
    MISS_REASON_HEAD_WENT_BACK: _ClassVar[MissReason]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class SnapshotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_STATE_UNSPECIFIED: _ClassVar[SnapshotState]
    SNAPSHOT_STATE_NONE: _ClassVar[SnapshotState]
    SNAPSHOT_STATE_COMMITTED: _ClassVar[SnapshotState]
    SNAPSHOT_STATE_PENDING: _ClassVar[SnapshotState]
    SNAPSHOT_STATE_FAILED: _ClassVar[SnapshotState]

class TurnState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TURN_STATE_UNSPECIFIED: _ClassVar[TurnState]
    TURN_STATE_WAITING: _ClassVar[TurnState]
    TURN_STATE_RUNNING: _ClassVar[TurnState]

class LoadStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_STAGE_UNSPECIFIED: _ClassVar[LoadStage]
    LOAD_STAGE_RETIRING: _ClassVar[LoadStage]
    LOAD_STAGE_LOADING: _ClassVar[LoadStage]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_NOT_LOADED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_LOADED: _ClassVar[ModelState]
    MODEL_STATE_RETIRING: _ClassVar[ModelState]
    MODEL_STATE_ASLEEP: _ClassVar[ModelState]
THINKING_MODE_UNSPECIFIED: ThinkingMode
THINKING_MODE_ON: ThinkingMode
THINKING_MODE_OFF: ThinkingMode
TOOL_CHOICE_KIND_UNSPECIFIED: ToolChoiceKind
TOOL_CHOICE_KIND_REQUIRED: ToolChoiceKind
TOOL_CHOICE_KIND_NAMED: ToolChoiceKind
TOOL_CHOICE_KIND_NONE: ToolChoiceKind
ON_FULL_POLICY_UNSPECIFIED: OnFullPolicy
ON_FULL_POLICY_REFUSE: OnFullPolicy
ON_FULL_POLICY_DROP_OLDEST: OnFullPolicy
ON_FULL_POLICY_SUMMARIZE: OnFullPolicy
MEMORY_MODE_UNSPECIFIED: MemoryMode
MEMORY_MODE_READ_WRITE: MemoryMode
MEMORY_MODE_READ_ONLY: MemoryMode
MEMORY_MODE_NONE: MemoryMode
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BACKGROUND: Priority
CONTINUATION_UNSPECIFIED: Continuation
CONTINUATION_NEW: Continuation
CONTINUATION_EXTENDED: Continuation
CONTINUATION_REWOUND: Continuation
CONTINUATION_REPLACED: Continuation
CONTINUATION_BRANCHED: Continuation
CONTINUATION_UNDECIDED: Continuation
CACHE_SOURCE_UNSPECIFIED: CacheSource
CACHE_SOURCE_COLD: CacheSource
CACHE_SOURCE_HOT: CacheSource
CACHE_SOURCE_WARM: CacheSource
CACHE_SOURCE_SHARED: CacheSource
CACHE_SOURCE_REPLAY: CacheSource
CACHE_SOURCE_WOKEN: CacheSource
PREFIX_MATCH_UNSPECIFIED: PrefixMatch
PREFIX_MATCH_NONE: PrefixMatch
PREFIX_MATCH_EXACT: PrefixMatch
PREFIX_MATCH_EXTEND: PrefixMatch
PREFIX_MATCH_DIVERGE: PrefixMatch
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_NEW_AGENT: MissReason
MISS_REASON_TEXT_DIFFERS: MissReason
MISS_REASON_KV_IDENTITY_DIFFERS: MissReason
MISS_REASON_STORE_UNREACHABLE: MissReason
MISS_REASON_STORE_TIMEOUT: MissReason
MISS_REASON_STORE_REFUSED: MissReason
MISS_REASON_BLOB_MISSING: MissReason
MISS_REASON_BLOB_DAMAGED: MissReason
MISS_REASON_MANIFEST_INVALID: MissReason
MISS_REASON_NO_MEMORY: MissReason
MISS_REASON_NO_STATE_POINT: MissReason
MISS_REASON_COMPUTED: MissReason
MISS_REASON_HEAD_WENT_BACK: MissReason
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_CANCELLED: FinishReason
SNAPSHOT_STATE_UNSPECIFIED: SnapshotState
SNAPSHOT_STATE_NONE: SnapshotState
SNAPSHOT_STATE_COMMITTED: SnapshotState
SNAPSHOT_STATE_PENDING: SnapshotState
SNAPSHOT_STATE_FAILED: SnapshotState
TURN_STATE_UNSPECIFIED: TurnState
TURN_STATE_WAITING: TurnState
TURN_STATE_RUNNING: TurnState
LOAD_STAGE_UNSPECIFIED: LoadStage
LOAD_STAGE_RETIRING: LoadStage
LOAD_STAGE_LOADING: LoadStage
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_NOT_LOADED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_LOADED: ModelState
MODEL_STATE_RETIRING: ModelState
MODEL_STATE_ASLEEP: ModelState

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "agent_id", "expected_version", "prompt", "messages", "append_messages", "prompt_token_ids", "sampling", "tools", "keep_partial", "priority", "json_schema", "regex", "expect_existing", "memory_mode", "base_version", "replace_memory", "on_full", "resume_token", "volatile", "tool_choice", "return_prompt_token_ids", "thinking", "template_settings", "ignore_unread_settings", "continue_final_message", "longest_gap_ms", "followed_peers")
    class TemplateSettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TemplateValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TemplateValue, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    APPEND_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    KEEP_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EXPECT_EXISTING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MODE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLACE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ON_FULL_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VOLATILE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_UNREAD_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LONGEST_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_PEERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    agent_id: str
    expected_version: int
    prompt: str
    messages: MessageList
    append_messages: MessageList
    prompt_token_ids: TokenIds
    sampling: Sampling
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    keep_partial: bool
    priority: Priority
    json_schema: str
    regex: str
    expect_existing: bool
    memory_mode: MemoryMode
    base_version: int
    replace_memory: bool
    on_full: OnFull
    resume_token: str
    volatile: VolatileRules
    tool_choice: ToolChoice
    return_prompt_token_ids: bool
    thinking: Thinking
    template_settings: _containers.MessageMap[str, TemplateValue]
    ignore_unread_settings: bool
    continue_final_message: bool
    longest_gap_ms: int
    followed_peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., agent_id: _Optional[str] = ..., expected_version: _Optional[int] = ..., prompt: _Optional[str] = ..., messages: _Optional[_Union[MessageList, _Mapping]] = ..., append_messages: _Optional[_Union[MessageList, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., keep_partial: bool = ..., priority: _Optional[_Union[Priority, str]] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., expect_existing: bool = ..., memory_mode: _Optional[_Union[MemoryMode, str]] = ..., base_version: _Optional[int] = ..., replace_memory: bool = ..., on_full: _Optional[_Union[OnFull, _Mapping]] = ..., resume_token: _Optional[str] = ..., volatile: _Optional[_Union[VolatileRules, _Mapping]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., return_prompt_token_ids: bool = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., template_settings: _Optional[_Mapping[str, TemplateValue]] = ..., ignore_unread_settings: bool = ..., continue_final_message: bool = ..., longest_gap_ms: _Optional[int] = ..., followed_peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("mode", "budget_tokens", "effort")
    MODE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    mode: ThinkingMode
    budget_tokens: int
    effort: str
    def __init__(self, mode: _Optional[_Union[ThinkingMode, str]] = ..., budget_tokens: _Optional[int] = ..., effort: _Optional[str] = ...) -> None: ...

class TemplateValue(_message.Message):
    __slots__ = ("flag", "number", "real", "text")
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    flag: bool
    number: int
    real: float
    text: str
    def __init__(self, flag: bool = ..., number: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("kind", "name", "one_call", "names")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ONE_CALL_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    kind: ToolChoiceKind
    name: str
    one_call: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[ToolChoiceKind, str]] = ..., name: _Optional[str] = ..., one_call: bool = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class VolatileRules(_message.Message):
    __slots__ = ("names", "is_default")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    is_default: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., is_default: bool = ...) -> None: ...

class OnFull(_message.Message):
    __slots__ = ("policy", "keep", "summary_request")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_REQUEST_FIELD_NUMBER: _ClassVar[int]
    policy: OnFullPolicy
    keep: float
    summary_request: str
    def __init__(self, policy: _Optional[_Union[OnFullPolicy, str]] = ..., keep: _Optional[float] = ..., summary_request: _Optional[str] = ...) -> None: ...

class MessageList(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[_message_pb2.Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[_message_pb2.Message, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ..., strict: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "repetition_penalty", "repetition_tokens", "logit_bias", "logprobs", "top_logprobs", "n", "clamp_max_tokens", "frequency_penalty", "presence_penalty", "most_drafts")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CLAMP_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MOST_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_penalty: float
    repetition_tokens: int
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: bool
    top_logprobs: int
    n: int
    clamp_max_tokens: bool
    frequency_penalty: float
    presence_penalty: float
    most_drafts: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., repetition_penalty: _Optional[float] = ..., repetition_tokens: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: bool = ..., top_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., clamp_max_tokens: bool = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., most_drafts: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "prefill_progress", "delta", "finished", "moved")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    prefill_progress: PrefillProgress
    delta: Delta
    finished: Finished
    moved: Moved
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., prefill_progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("peer", "resume_token", "expires_in")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_FIELD_NUMBER: _ClassVar[int]
    peer: str
    resume_token: str
    expires_in: _duration_pb2.Duration
    def __init__(self, peer: _Optional[str] = ..., resume_token: _Optional[str] = ..., expires_in: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "cached_tokens", "source", "reason", "miss", "match", "parent_version", "continuation", "base_version", "kept", "is_time_untold", "prompt_token_ids", "ignored_settings", "difference")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    PARENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    IS_TIME_UNTOLD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    source: CacheSource
    reason: str
    miss: MissReason
    match: PrefixMatch
    parent_version: int
    continuation: Continuation
    base_version: int
    kept: _containers.RepeatedScalarFieldContainer[str]
    is_time_untold: bool
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignored_settings: _containers.RepeatedScalarFieldContainer[str]
    difference: Difference
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., source: _Optional[_Union[CacheSource, str]] = ..., reason: _Optional[str] = ..., miss: _Optional[_Union[MissReason, str]] = ..., match: _Optional[_Union[PrefixMatch, str]] = ..., parent_version: _Optional[int] = ..., continuation: _Optional[_Union[Continuation, str]] = ..., base_version: _Optional[int] = ..., kept: _Optional[_Iterable[str]] = ..., is_time_untold: bool = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., ignored_settings: _Optional[_Iterable[str]] = ..., difference: _Optional[_Union[Difference, _Mapping]] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("character", "remembered", "given", "message", "role", "what", "rules")
    CHARACTER_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    character: int
    remembered: str
    given: str
    message: int
    role: str
    what: str
    rules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, character: _Optional[int] = ..., remembered: _Optional[str] = ..., given: _Optional[str] = ..., message: _Optional[int] = ..., role: _Optional[str] = ..., what: _Optional[str] = ..., rules: _Optional[_Iterable[str]] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("tokens_done", "tokens_total")
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    tokens_done: int
    tokens_total: int
    def __init__(self, tokens_done: _Optional[int] = ..., tokens_total: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "choice", "logprobs", "reasoning_text")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    choice: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    reasoning_text: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., choice: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., reasoning_text: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top", "spelling")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    SPELLING_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    spelling: bytes
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., spelling: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "spelling")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SPELLING_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    spelling: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., spelling: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "matched_stop", "usage", "timings", "snapshot", "tool_calls", "choice", "memory_tokens", "context_tokens", "shortening")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHORTENING_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    matched_stop: str
    usage: Usage
    timings: Timings
    snapshot: SnapshotOutcome
    tool_calls: _containers.RepeatedCompositeFieldContainer[_message_pb2.ToolCall]
    choice: int
    memory_tokens: int
    context_tokens: int
    shortening: Shortening
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotOutcome, _Mapping]] = ..., tool_calls: _Optional[_Iterable[_Union[_message_pb2.ToolCall, _Mapping]]] = ..., choice: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., shortening: _Optional[_Union[Shortening, _Mapping]] = ...) -> None: ...

class Shortening(_message.Message):
    __slots__ = ("policy", "dropped_messages", "kept_messages", "before_reply")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    KEPT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BEFORE_REPLY_FIELD_NUMBER: _ClassVar[int]
    policy: OnFullPolicy
    dropped_messages: int
    kept_messages: int
    before_reply: bool
    def __init__(self, policy: _Optional[_Union[OnFullPolicy, str]] = ..., dropped_messages: _Optional[int] = ..., kept_messages: _Optional[int] = ..., before_reply: bool = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "drafted_tokens", "accepted_draft_tokens", "mask_passes")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MASK_PASSES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_draft_tokens: int
    mask_passes: MaskPasses
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., mask_passes: _Optional[_Union[MaskPasses, _Mapping]] = ...) -> None: ...

class MaskPasses(_message.Message):
    __slots__ = ("passes", "rows")
    PASSES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    passes: int
    rows: int
    def __init__(self, passes: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue", "restore", "prefill", "first_token", "decode")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    restore: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    first_token: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., restore: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., first_token: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SnapshotOutcome(_message.Message):
    __slots__ = ("state", "version", "reason", "manifest", "written_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: SnapshotState
    version: int
    reason: str
    manifest: _manifest_pb2.Digest
    written_bytes: int
    def __init__(self, state: _Optional[_Union[SnapshotState, str]] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ..., manifest: _Optional[_Union[_manifest_pb2.Digest, _Mapping]] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class ListTurnsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTurnsResponse(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    def __init__(self, turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("request_id", "agent_id", "state", "age", "prompt_tokens", "cached_tokens", "completion_tokens", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    agent_id: str
    state: TurnState
    age: _duration_pb2.Duration
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., state: _Optional[_Union[TurnState, str]] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class CancelTurnRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelTurnResponse(_message.Message):
    __slots__ = ("finished",)
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    def __init__(self, finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ...) -> None: ...

class ListHotMemoriesRequest(_message.Message):
    __slots__ = ("agent_ids",)
    AGENT_IDS_FIELD_NUMBER: _ClassVar[int]
    agent_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListHotMemoriesResponse(_message.Message):
    __slots__ = ("memories",)
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    memories: _containers.RepeatedCompositeFieldContainer[HotMemory]
    def __init__(self, memories: _Optional[_Iterable[_Union[HotMemory, _Mapping]]] = ...) -> None: ...

class HotMemory(_message.Message):
    __slots__ = ("agent_id", "tokens", "kv_bytes", "version", "is_stored", "is_woken_ahead")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_STORED_FIELD_NUMBER: _ClassVar[int]
    IS_WOKEN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    tokens: int
    kv_bytes: int
    version: int
    is_stored: bool
    is_woken_ahead: bool
    def __init__(self, agent_id: _Optional[str] = ..., tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., version: _Optional[int] = ..., is_stored: bool = ..., is_woken_ahead: bool = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("model", "agent_id", "prompt", "messages", "append_messages", "prompt_token_ids", "tools", "thinking", "template_settings", "ignore_unread_settings")
    class TemplateSettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TemplateValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TemplateValue, _Mapping]] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    APPEND_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_UNREAD_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    agent_id: str
    prompt: str
    messages: MessageList
    append_messages: MessageList
    prompt_token_ids: TokenIds
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    thinking: Thinking
    template_settings: _containers.MessageMap[str, TemplateValue]
    ignore_unread_settings: bool
    def __init__(self, model: _Optional[str] = ..., agent_id: _Optional[str] = ..., prompt: _Optional[str] = ..., messages: _Optional[_Union[MessageList, _Mapping]] = ..., append_messages: _Optional[_Union[MessageList, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., template_settings: _Optional[_Mapping[str, TemplateValue]] = ..., ignore_unread_settings: bool = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("model", "tokens", "cached_tokens", "computed_tokens", "source", "reason", "miss", "match", "version", "restore", "prefill")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokens: int
    cached_tokens: int
    computed_tokens: int
    source: CacheSource
    reason: str
    miss: MissReason
    match: PrefixMatch
    version: int
    restore: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., source: _Optional[_Union[CacheSource, str]] = ..., reason: _Optional[str] = ..., miss: _Optional[_Union[MissReason, str]] = ..., match: _Optional[_Union[PrefixMatch, str]] = ..., version: _Optional[int] = ..., restore: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("model", "agent_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    agent_id: str
    def __init__(self, model: _Optional[str] = ..., agent_id: _Optional[str] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("model", "version", "tokens", "kept_bytes", "freed_bytes", "wake")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    tokens: int
    kept_bytes: int
    freed_bytes: int
    wake: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., tokens: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., freed_bytes: _Optional[int] = ..., wake: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("model", "prompt", "messages", "prompt_token_ids", "tools", "thinking", "template_settings", "ignore_unread_settings", "continue_final_message")
    class TemplateSettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TemplateValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TemplateValue, _Mapping]] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_UNREAD_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    messages: MessageList
    prompt_token_ids: TokenIds
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    thinking: Thinking
    template_settings: _containers.MessageMap[str, TemplateValue]
    ignore_unread_settings: bool
    continue_final_message: bool
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., messages: _Optional[_Union[MessageList, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., template_settings: _Optional[_Mapping[str, TemplateValue]] = ..., ignore_unread_settings: bool = ..., continue_final_message: bool = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("tokens", "context_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    context_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "drop_unstored")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DROP_UNSTORED_FIELD_NUMBER: _ClassVar[int]
    model: str
    drop_unstored: bool
    def __init__(self, model: _Optional[str] = ..., drop_unstored: bool = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("progress", "done")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    progress: LoadProgress
    done: LoadedModel
    def __init__(self, progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., done: _Optional[_Union[LoadedModel, _Mapping]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("stage", "elapsed")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    stage: LoadStage
    elapsed: _duration_pb2.Duration
    def __init__(self, stage: _Optional[_Union[LoadStage, str]] = ..., elapsed: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LoadedModel(_message.Message):
    __slots__ = ("model", "left")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    model: Model
    left: MemoriesLeft
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ..., left: _Optional[_Union[MemoriesLeft, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "drop_unstored")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DROP_UNSTORED_FIELD_NUMBER: _ClassVar[int]
    model: str
    drop_unstored: bool
    def __init__(self, model: _Optional[str] = ..., drop_unstored: bool = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("left",)
    LEFT_FIELD_NUMBER: _ClassVar[int]
    left: MemoriesLeft
    def __init__(self, left: _Optional[_Union[MemoriesLeft, _Mapping]] = ...) -> None: ...

class MemoriesLeft(_message.Message):
    __slots__ = ("stored", "dropped")
    STORED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    dropped: int
    def __init__(self, stored: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "dimensions", "truncate", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    dimensions: int
    truncate: bool
    priority: Priority
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., dimensions: _Optional[int] = ..., truncate: bool = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("model", "embeddings")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    def __init__(self, model: _Optional[str] = ..., embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values", "tokens")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    tokens: int
    def __init__(self, values: _Optional[_Iterable[float]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "kv_identity", "kv_identity_hash", "tokenizer_digest", "template_digest", "context_tokens", "kv_bytes_per_token", "kv_bytes_per_token_fp16", "policy_applied_layers", "layer_count", "cell_tokens", "compute_type", "state", "kv_policy", "kv_policy_why", "sampling_defaults", "embedding_dimensions", "only_embeds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FP16_FIELD_NUMBER: _ClassVar[int]
    POLICY_APPLIED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    CELL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_WHY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ONLY_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kv_identity: _identity_pb2.KvIdentity
    kv_identity_hash: str
    tokenizer_digest: str
    template_digest: str
    context_tokens: int
    kv_bytes_per_token: int
    kv_bytes_per_token_fp16: int
    policy_applied_layers: int
    layer_count: int
    cell_tokens: int
    compute_type: str
    state: ModelState
    kv_policy: str
    kv_policy_why: str
    sampling_defaults: Sampling
    embedding_dimensions: int
    only_embeds: bool
    def __init__(self, name: _Optional[str] = ..., kv_identity: _Optional[_Union[_identity_pb2.KvIdentity, _Mapping]] = ..., kv_identity_hash: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., context_tokens: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_bytes_per_token_fp16: _Optional[int] = ..., policy_applied_layers: _Optional[int] = ..., layer_count: _Optional[int] = ..., cell_tokens: _Optional[int] = ..., compute_type: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., kv_policy: _Optional[str] = ..., kv_policy_why: _Optional[str] = ..., sampling_defaults: _Optional[_Union[Sampling, _Mapping]] = ..., embedding_dimensions: _Optional[int] = ..., only_embeds: bool = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("version", "device", "blas", "limits", "features", "kernels", "lease_owner")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLAS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    LEASE_OWNER_FIELD_NUMBER: _ClassVar[int]
    version: str
    device: str
    blas: str
    limits: Limits
    features: _containers.RepeatedScalarFieldContainer[str]
    kernels: Kernels
    lease_owner: str
    def __init__(self, version: _Optional[str] = ..., device: _Optional[str] = ..., blas: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., features: _Optional[_Iterable[str]] = ..., kernels: _Optional[_Union[Kernels, _Mapping]] = ..., lease_owner: _Optional[str] = ...) -> None: ...

class Kernels(_message.Message):
    __slots__ = ("attention", "encoding", "products", "failure")
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    attention: str
    encoding: str
    products: str
    failure: str
    def __init__(self, attention: _Optional[str] = ..., encoding: _Optional[str] = ..., products: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_prompt_bytes", "max_request_bytes", "max_unread_bytes", "max_turns", "max_turns_per_namespace", "max_turns_per_caller", "kv_memory_bytes")
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_UNREAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_PER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_PER_CALLER_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_prompt_bytes: int
    max_request_bytes: int
    max_unread_bytes: int
    max_turns: int
    max_turns_per_namespace: int
    max_turns_per_caller: int
    kv_memory_bytes: int
    def __init__(self, max_prompt_bytes: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_unread_bytes: _Optional[int] = ..., max_turns: _Optional[int] = ..., max_turns_per_namespace: _Optional[int] = ..., max_turns_per_caller: _Optional[int] = ..., kv_memory_bytes: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("model", "uptime", "namespaces", "engine", "store_is_reachable")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STORE_IS_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    model: str
    uptime: _duration_pb2.Duration
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    engine: EngineStats
    store_is_reachable: bool
    def __init__(self, model: _Optional[str] = ..., uptime: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., engine: _Optional[_Union[EngineStats, _Mapping]] = ..., store_is_reachable: bool = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace", "turns", "turn_ends", "refusals", "prefilled_tokens", "cached_tokens", "decoded_tokens", "sources", "misses", "publications", "published_bytes", "waiting_turns", "running_turns", "kv_memory_used_bytes", "made_good", "owed_memories", "owed_bytes", "failed_memories", "wakes")
    class TurnEndsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PublicationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MadeGoodEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class WakesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TURN_ENDS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TURNS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TURNS_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MADE_GOOD_FIELD_NUMBER: _ClassVar[int]
    OWED_MEMORIES_FIELD_NUMBER: _ClassVar[int]
    OWED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_MEMORIES_FIELD_NUMBER: _ClassVar[int]
    WAKES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    turns: int
    turn_ends: _containers.ScalarMap[str, int]
    refusals: _containers.ScalarMap[str, int]
    prefilled_tokens: int
    cached_tokens: int
    decoded_tokens: int
    sources: _containers.ScalarMap[str, int]
    misses: _containers.ScalarMap[str, int]
    publications: _containers.ScalarMap[str, int]
    published_bytes: int
    waiting_turns: int
    running_turns: int
    kv_memory_used_bytes: int
    made_good: _containers.ScalarMap[str, int]
    owed_memories: int
    owed_bytes: int
    failed_memories: int
    wakes: _containers.ScalarMap[str, int]
    def __init__(self, namespace: _Optional[str] = ..., turns: _Optional[int] = ..., turn_ends: _Optional[_Mapping[str, int]] = ..., refusals: _Optional[_Mapping[str, int]] = ..., prefilled_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., decoded_tokens: _Optional[int] = ..., sources: _Optional[_Mapping[str, int]] = ..., misses: _Optional[_Mapping[str, int]] = ..., publications: _Optional[_Mapping[str, int]] = ..., published_bytes: _Optional[int] = ..., waiting_turns: _Optional[int] = ..., running_turns: _Optional[int] = ..., kv_memory_used_bytes: _Optional[int] = ..., made_good: _Optional[_Mapping[str, int]] = ..., owed_memories: _Optional[int] = ..., owed_bytes: _Optional[int] = ..., failed_memories: _Optional[int] = ..., wakes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("kv_memory_bytes", "kv_memory_used_bytes", "hot_memories", "restoring_bytes", "publishing_bytes", "prompt_bytes", "computed_tokens", "preemptions", "model_loads")
    KV_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOT_MEMORIES_FIELD_NUMBER: _ClassVar[int]
    RESTORING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUBLISHING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_LOADS_FIELD_NUMBER: _ClassVar[int]
    kv_memory_bytes: int
    kv_memory_used_bytes: int
    hot_memories: int
    restoring_bytes: int
    publishing_bytes: int
    prompt_bytes: int
    computed_tokens: int
    preemptions: int
    model_loads: int
    def __init__(self, kv_memory_bytes: _Optional[int] = ..., kv_memory_used_bytes: _Optional[int] = ..., hot_memories: _Optional[int] = ..., restoring_bytes: _Optional[int] = ..., publishing_bytes: _Optional[int] = ..., prompt_bytes: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., model_loads: _Optional[int] = ...) -> None: ...
