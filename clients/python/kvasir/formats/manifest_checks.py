"""What a manifest may hold: each field and each named file is checked, of any origin."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any
from zlib import adler32

from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest, are_hashes, is_hash
from kvasir.formats.layer_groups import (
    KEEPS_ALL,
    first_touched_block,
    has_recurrent_layers,
    keeps_all_tokens,
    windows_of,
)
from kvasir.names import check_request_id

# Of the first release. It changes with the first change after it that a reader of that release would take for something
# else; windows and their runs were added before, and a reader without them refuses the layouts that have any.
MANIFEST_FORMAT = 1
MAX_TOKENS = 4_000_000
MAX_LAYERS = 1024
MAX_STATES = 1024
MAX_MESSAGES = 100_000
MAX_DROPPED_MESSAGES = 1 << 31
MAX_DIMENSION = 1 << 20
MAX_TEMPLATE_TIME_MS = 253_402_300_799_999  # the last of the year 9999
MAX_TOOL_PLACES = 1 << 16
MAX_ASLEEP_BYTES = 1 << 53  # of all files that were let go
MAX_MILLISECONDS_TO_WAKE = 365 * 24 * 3600 * 1000
MAX_STATE_TENSORS = 16
MAX_STATE_AXES = 7
ROLES = ("system", "user", "assistant", "tool")
FINISH_REASONS = frozenset({"", "stop", "length", "stop_sequence", "tool_calls", "cancelled"})
_SUMMED = 256  # bytes, whose sum is below Adler-32's modulus whatever they are
_BITS = (4, 8, 16)
_KEEPS_STATE = (identity_pb2.LAYER_KIND_WINDOW, identity_pb2.LAYER_KIND_STATE)
_STATE_TYPES = (identity_pb2.TENSOR_TYPE_FLOAT32, identity_pb2.TENSOR_TYPE_FLOAT16, identity_pb2.TENSOR_TYPE_BFLOAT16)


def check(manifest: Any) -> None:
    """Raise InvalidArgument, naming the field, unless the manifest agrees with itself and keeps the limits."""
    check_content(manifest)
    check_files(manifest)


def check_content(manifest: Any) -> None:
    if manifest.format != MANIFEST_FORMAT:
        raise wrong("format", f"expected {MANIFEST_FORMAT}, got {manifest.format}")
    check_kv_identity(manifest.kv_identity)
    _check_tokens(manifest)
    _check_computed(manifest)
    for name in ("tokenizer_digest", "template_digest"):
        _check_optional_hash(name, getattr(manifest, name))
    _check_messages(manifest)
    if manifest.HasField("turn"):
        _check_turn(manifest)
    if (dropped := manifest.shortened.dropped_messages) > MAX_DROPPED_MESSAGES:
        raise wrong("shortened.dropped_messages", f"expected at most {MAX_DROPPED_MESSAGES}, got {dropped}")
    if (behind := manifest.shortened.dropped_behind_question) > dropped:
        raise wrong(
            "shortened.dropped_behind_question", f"expected at most {dropped}, all that are left out, got {behind}"
        )
    if manifest.created_unix_ms < 0:
        raise wrong("created_unix_ms", f"expected 0 or more, got {manifest.created_unix_ms}")
    if not 0 <= manifest.template_time_ms <= MAX_TEMPLATE_TIME_MS:
        raise wrong("template_time_ms", f"expected 0 to {MAX_TEMPLATE_TIME_MS}, got {manifest.template_time_ms}")
    _check_optional_hash("tools_order.set_hash", manifest.tools_order.set_hash)
    if (places := len(manifest.tools_order.places)) > MAX_TOOL_PLACES:
        raise wrong("tools_order.places", f"expected at most {MAX_TOOL_PLACES}, got {places}")


def check_files(manifest: Any) -> None:
    """Of what is known last: the files, and the version before."""
    if manifest.HasField("asleep"):
        _check_asleep(manifest)
    else:
        _check_blobs(manifest)
    _check_optional_hash("parent_manifest", manifest.parent_manifest)


def check_kv_identity(identity: identity_pb2.KvIdentity) -> None:
    """Raise InvalidArgument unless the identity describes KV that could exist."""
    _check_kv_identity(identity.SerializeToString(deterministic=True))


@lru_cache(maxsize=16)  # each commit of a line has the same one; a refused one is not remembered
def _check_kv_identity(serialized: bytes) -> None:
    identity = identity_pb2.KvIdentity.FromString(serialized)
    if not is_hash(identity.weights_digest):
        raise wrong("kv_identity.weights_digest", "expected 64 lower-case hex digits")
    if not 1 <= len(identity.layers) <= MAX_LAYERS:
        raise wrong("kv_identity.layers", f"expected 1 to {MAX_LAYERS}, got {len(identity.layers)}")
    policy = identity.policy
    for name in ("key_bits", "value_bits"):
        if getattr(policy, name) not in _BITS:
            raise wrong(f"kv_identity.policy.{name}", f"expected one of {_BITS}, got {getattr(policy, name)}")
    is_quantized = min(policy.key_bits, policy.value_bits) < 16
    if is_quantized != (policy.group_size > 0):
        raise wrong("kv_identity.policy.group_size", "expected above 0 when quantized, else 0")
    if policy.scale_type not in (identity_pb2.SCALE_TYPE_FLOAT16, identity_pb2.SCALE_TYPE_BFLOAT16):
        raise wrong("kv_identity.policy.scale_type", "expected FLOAT16 or BFLOAT16")
    if policy.key_rotation not in (identity_pb2.KEY_ROTATION_NONE, identity_pb2.KEY_ROTATION_HADAMARD):
        raise wrong("kv_identity.policy.key_rotation", "expected NONE or HADAMARD")
    exact = list(policy.exact_layers)
    if exact != sorted(set(exact)) or (exact and exact[-1] >= len(identity.layers)):
        raise wrong("kv_identity.policy.exact_layers", "expected ascending indexes of layers")
    for index, layer in enumerate(identity.layers):
        _check_layer(f"kv_identity.layers[{index}]", layer)


def _check_layer(field: str, layer: identity_pb2.LayerLayout) -> None:
    if layer.kind not in (*KEEPS_ALL, *_KEEPS_STATE):
        raise wrong(f"{field}.kind", f"expected FULL, WINDOW, LATENT or STATE, got {layer.kind}")
    if (layer.window > 0) != (layer.kind == identity_pb2.LAYER_KIND_WINDOW):
        raise wrong(f"{field}.window", f"expected above 0 for a window layer and 0 for others, got {layer.window}")
    smallest = 0 if layer.kind == identity_pb2.LAYER_KIND_STATE else 1
    for name, least in (("kv_heads", smallest), ("key_dim", smallest), ("value_dim", 0)):
        if not least <= getattr(layer, name) <= MAX_DIMENSION:
            raise wrong(f"{field}.{name}", f"expected {least} to {MAX_DIMENSION}, got {getattr(layer, name)}")
    _check_state_tensors(f"{field}.state_tensors", layer)


def _check_state_tensors(field: str, layer: identity_pb2.LayerLayout) -> None:
    if layer.state_tensors and layer.kind != identity_pb2.LAYER_KIND_STATE:
        raise wrong(field, "expected none: the layer is not recurrent")
    if len(layer.state_tensors) > MAX_STATE_TENSORS:
        raise wrong(field, f"expected at most {MAX_STATE_TENSORS}, got {len(layer.state_tensors)}")
    for index, tensor in enumerate(layer.state_tensors):
        if tensor.type not in _STATE_TYPES:
            raise wrong(f"{field}[{index}].type", f"expected FLOAT32, FLOAT16 or BFLOAT16, got {tensor.type}")
        shape = list(tensor.shape)
        if not 1 <= len(shape) <= MAX_STATE_AXES or not all(1 <= size <= MAX_DIMENSION for size in shape):
            raise wrong(f"{field}[{index}].shape", f"expected 1 to {MAX_STATE_AXES} sizes of 1 to {MAX_DIMENSION}")


def _check_tokens(manifest: manifest_pb2.Manifest) -> None:
    count = len(manifest.token_ids)
    if not 1 <= count <= MAX_TOKENS:
        raise wrong("token_ids", f"expected 1 to {MAX_TOKENS}, got {count}")
    if len(manifest.token_chars) != count:
        raise wrong("token_chars", f"expected {count}, one per token, got {len(manifest.token_chars)}")
    chars, length = _sum_of(manifest.token_chars), len(manifest.text)
    if chars != length:
        raise wrong("token_chars", f"expected a sum of {length}, the text's length, got {chars}")
    if manifest.shareable_tokens > count:
        raise wrong("shareable_tokens", f"expected at most {count}, got {manifest.shareable_tokens}")


def _sum_of(counts: Sequence[int]) -> int:
    """As `sum`, of bytes in a tenth of the time: Adler-32's low half is one and their sum, modulo 65,521."""
    if not isinstance(counts, bytes):
        return sum(counts)
    return sum((adler32(counts[at : at + _SUMMED]) & 0xFFFF) - 1 for at in range(0, len(counts), _SUMMED))


def _check_computed(manifest: manifest_pb2.Manifest) -> None:
    edges, tokens = manifest.computed.decoded, len(manifest.token_ids)
    if len(edges) % 2:
        raise wrong("computed.decoded", f"expected pairs, got {len(edges)} numbers")
    before = 0
    for index, edge in enumerate(edges):
        least = before if index and index % 2 == 0 else before + 1  # a run may begin where the last one ended
        if not least <= edge <= tokens:
            raise wrong(f"computed.decoded[{index}]", f"expected {least} to {tokens}, got {edge}")
        before = edge


def _check_messages(manifest: manifest_pb2.Manifest) -> None:
    if len(manifest.messages) > MAX_MESSAGES:
        raise wrong("messages", f"expected at most {MAX_MESSAGES}, got {len(manifest.messages)}")
    for index, message in enumerate(manifest.messages):
        if message.role not in ROLES:
            raise wrong(f"messages[{index}].role", f"expected one of {sorted(ROLES)}")
        if message.is_note and message.role != "system":
            raise wrong(f"messages[{index}].is_note", "expected it of a system's message alone")


def _check_turn(manifest: manifest_pb2.Manifest) -> None:
    turn = manifest.turn
    if turn.request_id:
        check_request_id(turn.request_id, "manifest.turn.request_id")
    for name, most in (("prompt_tokens", len(manifest.token_ids)), ("prompt_chars", len(manifest.text))):
        if getattr(turn, name) > most:
            raise wrong(f"turn.{name}", f"expected at most {most}, got {getattr(turn, name)}")
    if turn.finish_reason not in FINISH_REASONS:
        raise wrong("turn.finish_reason", f"expected one of {sorted(FINISH_REASONS - {''})}")
    _check_optional_hash("turn.input_digest", turn.input_digest)


def _check_asleep(manifest: manifest_pb2.Manifest) -> None:
    """A sleeping manifest names no blob, and knows how its rows were computed."""
    for name in ("blocks", "windows", "states"):
        if getattr(manifest, name):
            raise wrong(name, "expected none: the snapshot is asleep")
    if manifest.HasField("tail"):
        raise wrong("tail", "expected none: the snapshot is asleep")
    if not manifest.HasField("computed"):
        raise wrong("computed", "expected it: the snapshot is asleep")
    if not manifest.asleep.files:
        raise wrong("asleep.files", "expected one or more")
    _check_digests("asleep.files", manifest.asleep.files)
    if (size_bytes := sum(digest.size_bytes for digest in manifest.asleep.files)) > MAX_ASLEEP_BYTES:
        raise wrong("asleep.files", f"expected at most {MAX_ASLEEP_BYTES} bytes in all, got {size_bytes}")
    if (wake_ms := manifest.asleep.wake_ms) > MAX_MILLISECONDS_TO_WAKE:
        raise wrong("asleep.wake_ms", f"expected at most {MAX_MILLISECONDS_TO_WAKE}, got {wake_ms}")


def _check_blobs(manifest: manifest_pb2.Manifest) -> None:
    count = len(manifest.token_ids) if keeps_all_tokens(manifest.kv_identity) else 0
    _check_rows("", manifest, 0, count)
    _check_windows(manifest)
    _check_states(manifest)
    digests = list(named(manifest))
    hashes = [digest.hash for digest in digests]
    # A long line has hundreds: all are looked at at once, and only a wrong one is looked for.
    if not are_hashes(hashes) or min([digest.size_bytes for digest in digests], default=0) < 0:
        _check_each_digest(manifest)
    if len(set(hashes)) != len(hashes):
        raise wrong("blobs", f"expected {len(hashes)} different ones, got {len(set(hashes))}")


def _check_rows(
    field: str, listed: manifest_pb2.Manifest | manifest_pb2.WindowBlocks, first_block: int, tokens: int
) -> None:
    """Blocks from `first_block` on and a tail hold the rows of `tokens` tokens. `field` ends with a dot or is empty."""
    expected = tokens // BLOCK_TOKENS - first_block
    if len(listed.blocks) != expected:
        raise wrong(f"{field}blocks", f"expected {expected}, got {len(listed.blocks)}")
    rest = tokens % BLOCK_TOKENS
    if listed.HasField("tail") != bool(rest):
        raise wrong(f"{field}tail", f"expected {f'one, for {rest} tokens' if rest else 'none'}")


def _check_windows(manifest: manifest_pb2.Manifest) -> None:
    """The runs of each window of the layout; the last run has all the blocks that the next token sees."""
    found, expected = [each.window for each in manifest.windows], list(windows_of(manifest.kv_identity))
    if list(dict.fromkeys(found)) != expected or found != sorted(found):
        raise wrong("windows", f"expected the layout's {expected}, ascending, got {found[:MAX_LAYERS]}")
    tokens, least = len(manifest.token_ids), 0
    for index, each in enumerate(manifest.windows):
        field, is_last = f"windows[{index}].", found[index + 1 : index + 2] != [each.window]
        touched = first_touched_block(each.window, tokens)
        if not least <= each.first_block <= touched:
            raise wrong(f"{field}first_block", f"expected {least} to {touched}, got {each.first_block}")
        if not is_last and not each.blocks:
            raise wrong(f"{field}blocks", "expected some: another run of the window follows")
        end = int(each.first_block) + len(each.blocks)
        _check_rows(field, each, each.first_block, tokens if is_last else end * BLOCK_TOKENS)
        least = 0 if is_last else end + 1


def _check_states(manifest: manifest_pb2.Manifest) -> None:
    if manifest.states and not has_recurrent_layers(manifest.kv_identity):
        raise wrong("states", "expected none: no layer is recurrent")
    if len(manifest.states) > MAX_STATES:
        raise wrong("states", f"expected at most {MAX_STATES}, got {len(manifest.states)}")
    seen = 0
    for index, point in enumerate(manifest.states):
        if not seen < point.tokens <= len(manifest.token_ids):
            raise wrong(
                f"states[{index}].tokens", f"expected {seen + 1} to {len(manifest.token_ids)}, got {point.tokens}"
            )
        seen = point.tokens


def _check_each_digest(manifest: manifest_pb2.Manifest) -> None:
    groups: list[tuple[str, manifest_pb2.Manifest | manifest_pb2.WindowBlocks]] = [("", manifest)]
    groups += ((f"windows[{index}].", each) for index, each in enumerate(manifest.windows))
    for field, listed in groups:
        _check_digests(f"{field}blocks", listed.blocks)
        if listed.HasField("tail"):
            _check_digest(f"{field}tail", listed.tail)
    for index, point in enumerate(manifest.states):
        _check_digest(f"states[{index}].digest", point.digest)


def named(manifest: manifest_pb2.Manifest) -> Iterator[manifest_pb2.Digest]:
    """Digests in the manifest's order."""
    groups: tuple[manifest_pb2.Manifest | manifest_pb2.WindowBlocks, ...] = (manifest, *manifest.windows)
    for listed in groups:
        yield from listed.blocks
        if listed.HasField("tail"):
            yield listed.tail
    yield from (point.digest for point in manifest.states)


def _check_optional_hash(field: str, text: str) -> None:
    if text and not is_hash(text):
        raise wrong(field, "expected 64 lower-case hex digits or nothing")


def _check_digests(field: str, listed: Sequence[manifest_pb2.Digest]) -> None:
    for index, digest in enumerate(listed):
        _check_digest(f"{field}[{index}]", digest)


def _check_digest(field: str, message: manifest_pb2.Digest) -> None:
    try:
        Digest.from_proto(message)
    except ValueError as error:
        raise wrong(field, str(error)) from None


def wrong(field: str, problem: str) -> InvalidArgument:
    where = f"manifest.{field}" if field else "manifest"
    return InvalidArgument.of(where, problem, reason="MANIFEST_REFUSED")
