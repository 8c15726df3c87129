"""Manifests: what is built is read back, and each way to be wrong is refused by the field's name."""

import re
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats import manifest
from kvasir.formats.digest import Digest, are_hashes, is_hash
from kvasir.formats.layer_groups import keeps_all_tokens
from kvasir.formats.manifest_checks import MAX_ASLEEP_BYTES, MAX_MILLISECONDS_TO_WAKE, _sum_of, check

from tests.made_models.synthetic import MIXED, SMALL, WINDOWED, SyntheticAgent

GOOD = SyntheticAgent(MIXED, 1).turn(600).manifest
PLAIN = SyntheticAgent(SMALL, 1).turn(512).manifest
Change = Callable[[manifest_pb2.Manifest], object]


def set_(path: str, value: object) -> Change:
    def change(message: manifest_pb2.Manifest) -> None:
        target: object = message
        *parents, last = path.split(".")
        for name in parents:
            target = target[int(name)] if name.isdigit() else getattr(target, name)  # type: ignore[index]
        setattr(target, last, value)

    return change


def test_what_is_built_is_read_back() -> None:
    data = manifest.build(
        kv_identity=SMALL,
        token_ids=[1, 2, 3],
        text="é🐍!",
        token_chars=[1, 1, 1],
        tail=Digest.of(b"tail"),
        shareable_tokens=2,
        created_unix_ms=5,
    )
    parsed = manifest.parse(data)
    assert (parsed.text, list(parsed.token_ids), parsed.shareable_tokens) == ("é🐍!", [1, 2, 3], 2)
    assert manifest.digests(parsed) == [Digest.of(b"tail")]
    assert data == parsed.SerializeToString(deterministic=True)


FILES = st.integers(0, 50).map(lambda number: Digest.of(b"file %d" % number))
NAMED = st.fixed_dictionaries({"blocks": st.lists(FILES, min_size=2, max_size=2, unique=True), "tail": FILES})


@given(NAMED, NAMED, st.sampled_from(["", "ab" * 32]))
def test_a_manifest_that_was_begun_before_its_files_were_known_is_built_as_one_that_was_not(
    first: dict[str, Any], second: dict[str, Any], parent: str
) -> None:
    chars = [200, *[1] * 598, 2]  # some tokens spell many spaces
    known = {"kv_identity": SMALL, "token_ids": [7, 1 << 20] * 300, "text": "x" * 800, "token_chars": chars}
    begun, known_blocks = manifest.begun(**known, created_unix_ms=5), None
    for files in (first, second, first):
        try:
            expected = manifest.build(**known, **files, parent_manifest=parent, created_unix_ms=5)
        except InvalidArgument as error:
            with pytest.raises(InvalidArgument, match=re.escape(error.message)):
                manifest.completed(begun, **files, parent_manifest=parent)
        else:
            found = manifest.completed(begun, **files, parent_manifest=parent)
            assert manifest.parse(found) == manifest.parse(expected)
            assert len(found) == len(expected)
            packed = files | {"blocks": manifest.PackedBlocks.of(files["blocks"], known_blocks)}
            assert manifest.completed(begun, **packed, parent_manifest=parent) == found
            known_blocks = packed["blocks"]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([list, tuple, lambda n: array("I", n)]))
def test_characters_of_tokens_are_what_they_were_however_they_are_listed(chars: list[int], listed: Any) -> None:
    begun = manifest.begun(
        kv_identity=SMALL,
        token_ids=listed(chars),
        text="x" * sum(chars),
        token_chars=listed(chars),
        created_unix_ms=0,
    )
    found = manifest.parse(manifest.completed(begun, tail=Digest.of(b"tail")))
    assert (list(found.token_ids), list(found.token_chars)) == (chars, chars)


@example(b"\xff" * 700)
@given(st.binary(max_size=700))
def test_counts_have_one_sum_however_they_are_listed(counts: bytes) -> None:
    assert _sum_of(counts) == _sum_of(list(counts)) == sum(counts)


@given(
    st.lists(
        st.sampled_from(["ab" * 32, "12" * 32, "AB" * 32, "ab " * 21 + "a", "", "a" * 63, "b" * 65, "\u0661" * 64])
    )
)
def test_texts_are_hashes_if_each_is_one(texts: list[str]) -> None:
    assert are_hashes(texts) == all(map(is_hash, texts))


def test_blobs_are_listed_in_order_and_once() -> None:
    message = manifest_pb2.Manifest()
    message.CopyFrom(GOOD)
    [window], [state] = GOOD.windows, GOOD.states
    named = (*GOOD.blocks, GOOD.tail, *window.blocks, window.tail, state.digest)
    listed = [Digest.from_proto(each) for each in named]
    assert len(set(listed)) == len(listed) == 6
    assert manifest.digests(message) == listed
    message.blocks[1].CopyFrom(message.blocks[0])
    assert manifest.digests(message) == [listed[0], *listed[2:]]


WRONG: dict[str, tuple[Change, str]] = {
    "format": (set_("format", 2), "format"),
    "no identity": (lambda m: m.ClearField("kv_identity"), "kv_identity.weights_digest"),
    "weights": (set_("kv_identity.weights_digest", "x"), "kv_identity.weights_digest"),
    "no layers": (lambda m: m.kv_identity.ClearField("layers"), "kv_identity.layers"),
    "layer kind": (set_("kv_identity.layers.0.kind", 0), "kv_identity.layers[0].kind"),
    "window": (set_("kv_identity.layers.0.window", 5), "kv_identity.layers[0].window"),
    "no window": (set_("kv_identity.layers.1.window", 0), "kv_identity.layers[1].window"),
    "no heads": (set_("kv_identity.layers.0.kv_heads", 0), "kv_identity.layers[0].kv_heads"),
    "a dimension of a billion": (set_("kv_identity.layers.0.key_dim", 1 << 30), "kv_identity.layers[0].key_dim"),
    "a state of what keeps all": (
        lambda m: m.kv_identity.layers[0].state_tensors.add(type=1, shape=[1]),
        "kv_identity.layers[0].state_tensors",
    ),
    "a state's type": (
        set_("kv_identity.layers.2.state_tensors.0.type", 0),
        "kv_identity.layers[2].state_tensors[0].type",
    ),
    "a state without a shape": (
        lambda m: m.kv_identity.layers[2].state_tensors[1].ClearField("shape"),
        "kv_identity.layers[2].state_tensors[1].shape",
    ),
    "a state without end": (
        lambda m: m.kv_identity.layers[2].state_tensors[0].shape.append(1 << 30),
        "kv_identity.layers[2].state_tensors[0].shape",
    ),
    "states without number": (
        lambda m: m.kv_identity.layers[2].state_tensors.extend([identity_pb2.StateTensor(type=1, shape=[1])] * 20),
        "kv_identity.layers[2].state_tensors",
    ),
    "bits": (set_("kv_identity.policy.key_bits", 3), "kv_identity.policy.key_bits"),
    "group": (set_("kv_identity.policy.group_size", 0), "kv_identity.policy.group_size"),
    "scales": (set_("kv_identity.policy.scale_type", 0), "kv_identity.policy.scale_type"),
    "rotation": (set_("kv_identity.policy.key_rotation", 0), "kv_identity.policy.key_rotation"),
    "exact layers": (lambda m: m.kv_identity.policy.exact_layers.extend([1, 0]), "kv_identity.policy.exact_layers"),
    "exact beyond": (lambda m: m.kv_identity.policy.exact_layers.append(9), "kv_identity.policy.exact_layers"),
    "no tokens": (lambda m: m.ClearField("token_ids"), "token_ids"),
    "a char count too few": (lambda m: m.token_chars.pop(), "token_chars"),
    "a sum too large": (set_("text", "x"), "token_chars"),
    "UTF-16 units": (set_("text", GOOD.text[:-2] + "🐍"), "token_chars"),
    "a block too few": (lambda m: m.blocks.pop(), "blocks"),
    "a block too many": (lambda m: m.blocks.append(m.blocks[0]), "blocks"),
    "a block's digest": (set_("blocks.1.hash", "../x"), "blocks[1]"),
    "a negative size": (set_("blocks.1.size_bytes", -1), "blocks[1]"),
    "a block twice": (lambda m: m.blocks[1].CopyFrom(m.blocks[0]), "blobs"),
    "no tail": (lambda m: m.ClearField("tail"), "tail"),
    "a tail's digest": (set_("tail.hash", "A" * 64), "tail"),
    "a state beyond": (set_("states.0.tokens", 601), "states[0].tokens"),
    "a state of nothing": (set_("states.0.tokens", 0), "states[0].tokens"),
    "states out of order": (lambda m: m.states.append(m.states[0]), "states[1].tokens"),
    "a state's digest": (set_("states.0.digest.hash", ""), "states[0].digest"),
    "shareable beyond": (set_("shareable_tokens", 601), "shareable_tokens"),
    "tokenizer": (set_("tokenizer_digest", "x"), "tokenizer_digest"),
    "template": (set_("template_digest", "x"), "template_digest"),
    "parent": (set_("parent_manifest", "x"), "parent_manifest"),
    "role": (lambda m: m.messages.add(role="root"), "messages[0].role"),
    "request id": (set_("turn.request_id", "a\nb"), "turn.request_id"),
    "prompt tokens": (set_("turn.prompt_tokens", 601), "turn.prompt_tokens"),
    "prompt chars": (set_("turn.prompt_chars", 1 << 40), "turn.prompt_chars"),
    "finish": (set_("turn.finish_reason", "died"), "turn.finish_reason"),
    "input digest": (set_("turn.input_digest", "x"), "turn.input_digest"),
    "time": (set_("created_unix_ms", -1), "created_unix_ms"),
    "a time before all": (set_("template_time_ms", -1), "template_time_ms"),
    "a time behind all": (set_("template_time_ms", 253_402_300_800_000), "template_time_ms"),
    "half a run": (lambda m: m.computed.decoded.append(3), "computed.decoded"),
    "a run of nothing": (lambda m: m.computed.decoded.extend([3, 3]), "computed.decoded[1]"),
    "a run before the last": (lambda m: m.computed.decoded.extend([3, 9, 8, 10]), "computed.decoded[2]"),
    "a run from the first token": (lambda m: m.computed.decoded.extend([0, 3]), "computed.decoded[0]"),
    "a run beyond": (lambda m: m.computed.decoded.extend([3, 601]), "computed.decoded[1]"),
    "asleep with blocks": (lambda m: m.asleep.SetInParent(), "blocks"),
    "left out": (set_("shortened.dropped_behind_question", 1), "shortened.dropped_behind_question"),
}


def check_refused(good: manifest_pb2.Manifest, change: Change, field: str) -> None:
    message = manifest_pb2.Manifest()
    message.CopyFrom(good)
    check(message)
    change(message)
    with pytest.raises(InvalidArgument) as caught:
        manifest.parse(message.SerializeToString())
    assert caught.value.field == f"manifest.{field}"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_refused_by_its_name(name: str) -> None:
    check_refused(GOOD, *WRONG[name])


def asleep(tokens: int) -> manifest_pb2.Manifest:
    """A conversation of so many tokens that is asleep, as of a model whose vocabulary is large."""
    text = "abcd" * tokens
    said = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    files = [Digest.of(bytes([number % 256, number // 256])) for number in range(tokens // 256)]
    return manifest_pb2.Manifest(
        format=1,
        kv_identity=SMALL,
        token_ids=[100_000 + number % 50_000 for number in range(tokens)],
        text=text,
        token_chars=[4] * tokens,
        messages=[manifest_pb2.Message(role="user", content=each) for each in said],
        computed=manifest_pb2.Computed(decoded=range(1, tokens, 150)[: tokens // 300 * 2]),
        asleep=manifest_pb2.Asleep(files=[digest.to_proto() for digest in files]),
    )


def test_a_hundred_thousand_agents_of_16_384_tokens_sleep_in_60_gb() -> None:
    data = asleep(16_384).SerializeToString(deterministic=True)
    manifest.parse(data)
    in_the_index = 4096  # bytes of an agent's rows, about; manifests are counted
    assert 100_000 * (len(data) + in_the_index) <= 60e9


@pytest.mark.parametrize("field", ["blocks", "tail", "windows", "states", "computed", "asleep.files"])
def test_a_sleeping_manifest_names_no_blob_and_lists_those_let_go(field: str) -> None:
    message = asleep(512)
    check(message)
    assert manifest.digests(message) == []
    if field in ("computed", "asleep.files"):
        (message.asleep if "." in field else message).ClearField(field.rpartition(".")[2])
    else:
        source = getattr(GOOD, field)
        target = getattr(message, field)
        target.CopyFrom(source) if field == "tail" else target.extend(source)
    with pytest.raises(InvalidArgument) as caught:
        manifest.parse(message.SerializeToString())
    assert caught.value.field == f"manifest.{field}"


@pytest.mark.parametrize("field", ["files", "wake_ms"])
def test_a_sleeping_manifest_whose_numbers_no_answer_can_hold_is_refused(field: str) -> None:
    message = asleep(512)
    message.asleep.wake_ms = MAX_MILLISECONDS_TO_WAKE
    message.asleep.files[0].size_bytes = MAX_ASLEEP_BYTES
    for digest in message.asleep.files[1:]:
        digest.size_bytes = 0
    check(message)
    if field == "files":
        message.asleep.files[1].size_bytes = 1
    else:
        message.asleep.wake_ms += 1
    with pytest.raises(InvalidArgument) as caught:
        manifest.parse(message.SerializeToString())
    assert (caught.value.reason, caught.value.field) == ("MANIFEST_REFUSED", f"manifest.asleep.{field}")


def test_a_whole_number_of_blocks_has_no_tail_and_plain_layers_have_no_states() -> None:
    for change, field in (
        (lambda m: m.tail.CopyFrom(m.blocks[0]), "tail"),
        (lambda m: m.states.add(tokens=5, digest=m.blocks[0]), "states"),
    ):
        message = manifest_pb2.Manifest()
        message.CopyFrom(PLAIN)
        change(message)
        with pytest.raises(InvalidArgument) as caught:
            check(message)
        assert caught.value.field == f"manifest.{field}"


def run_before(message: manifest_pb2.Manifest, place: int, first_block: int) -> manifest_pb2.WindowBlocks:
    """Put a run of one block before the one of windows[place]; returns it."""
    later = [manifest_pb2.WindowBlocks.FromString(each.SerializeToString()) for each in message.windows[place:]]
    del message.windows[place:]
    run = message.windows.add(window=later[0].window, first_block=first_block)
    run.blocks.append(Digest.of(b"an earlier block").to_proto())
    message.windows.extend(later)
    return run


WINDOWED_GOOD = SyntheticAgent(WINDOWED, 1, more_window_blocks=1).turn(1100).manifest  # of windows 300 and 512
WRONG_WINDOWS: dict[str, tuple[Change, str]] = {
    "one is missing": (lambda m: m.windows.pop(), "windows"),
    "one twice": (lambda m: m.windows.append(m.windows[1]), "windows[1].tail"),
    "a run without a gap before the next": (lambda m: run_before(m, 1, 0), "windows[2].first_block"),
    "a run behind the next": (lambda m: run_before(m, 1, 3), "windows[1].first_block"),
    "an empty run": (lambda m: run_before(m, 0, 0).ClearField("blocks"), "windows[0].blocks"),
    "a run with a tail": (lambda m: run_before(m, 0, 0).tail.CopyFrom(m.tail), "windows[0].tail"),
    "out of order": (lambda m: m.windows.reverse(), "windows"),
    "of no layer": (set_("windows.1.window", 513), "windows"),
    "of the full layers": (set_("windows.0.window", 0), "windows"),
    "begins too late": (
        lambda m: (m.windows[0].ClearField("blocks"), set_("windows.0.first_block", 4)(m)),
        "windows[0].first_block",
    ),
    "a block too few": (lambda m: m.windows[0].blocks.pop(), "windows[0].blocks"),
    "a block too many": (lambda m: m.windows[1].blocks.append(m.windows[1].blocks[0]), "windows[1].blocks"),
    "begins nowhere": (set_("windows.1.first_block", 1 << 63), "windows[1].first_block"),
    "no tail": (lambda m: m.windows[1].ClearField("tail"), "windows[1].tail"),
    "a block's digest": (set_("windows.1.blocks.0.hash", "../x"), "windows[1].blocks[0]"),
    "a tail's size": (set_("windows.1.tail.size_bytes", -1), "windows[1].tail"),
    "another group's block": (lambda m: m.windows[0].blocks[0].CopyFrom(m.blocks[0]), "blobs"),
    "a state of no layer": (lambda m: m.states.add(tokens=5, digest=m.blocks[0]), "states"),
}


@pytest.mark.parametrize("name", WRONG_WINDOWS)
def test_a_wrong_window_is_refused_by_its_name(name: str) -> None:
    check_refused(WINDOWED_GOOD, *WRONG_WINDOWS[name])


def test_a_window_lists_what_it_saw_earlier_too() -> None:
    """With a gap before the last run: the end of a prompt, say, behind which a long reply follows."""
    message = manifest_pb2.Manifest()
    message.CopyFrom(WINDOWED_GOOD)
    run = run_before(message, 0, 0)
    assert [(each.window, each.first_block) for each in message.windows] == [(300, 0), (300, 2), (512, 1)]
    data = message.SerializeToString()
    assert Digest.from_proto(run.blocks[0]) in manifest.digests(manifest.parse(data))


def test_a_layout_without_windows_lists_none() -> None:
    message = manifest_pb2.Manifest()
    message.CopyFrom(PLAIN)
    message.windows.add(window=300, first_block=2)
    with pytest.raises(InvalidArgument, match="windows"):
        check(message)


@pytest.mark.parametrize("tokens", [1, 255, 256, 299, 300, 511, 512, 767, 768, 1100])
def test_a_window_lists_the_blocks_that_the_next_token_sees_and_may_list_more(tokens: int) -> None:
    for more in (0, 1):
        message = SyntheticAgent(WINDOWED, 1, more_window_blocks=more).turn(tokens).manifest
        check(message)
        for each in message.windows:
            seen = range(max(0, tokens - (each.window - 1)), tokens)
            assert each.first_block == max(0, seen.start // 256 - more)
            assert each.first_block + len(each.blocks) == tokens // 256
            if each.blocks and not more:
                # Without its first block, a row that the next token sees is nowhere.
                del each.blocks[0]
                each.first_block += 1
                with pytest.raises(InvalidArgument, match="first_block: expected 0 to"):
                    check(message)


_CUT = b"\x08\x01\x1a\xc0\x84\x3d" + bytes(1_000_000) + b"\x12"  # so long that its fields are counted


@pytest.mark.parametrize("data", [b"\xff", b"", b"\x08\x01", _CUT, b"x" * 1000, bytes(70 << 20)])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        manifest.parse(data)


@pytest.mark.parametrize("hollow", [b"\x42\x00", b"\x12\x02\x12\x00", b"\x42\x02\x22\x00"])
def test_a_manifest_of_many_empty_parts_is_refused_before_it_is_parsed(hollow: bytes) -> None:
    with pytest.raises(InvalidArgument, match="at most 500000 fields"):
        manifest.parse(b"\x08\x01" + hollow * 500_000)


def test_half_a_million_tokens_with_their_messages_fit() -> None:
    tokens = 500_000
    text = "漢字かな。 Words. " * (tokens * 5 // 16)
    message = manifest_pb2.Manifest()
    message.CopyFrom(PLAIN)
    message.token_ids[:] = [200_000] * tokens
    message.text, message.token_chars[:] = text, [len(text) // tokens] * (tokens - 1)
    message.token_chars.append(len(text) - sum(message.token_chars))
    message.ClearField("blocks")
    message.blocks.extend(Digest(f"{index:064x}", 9 << 20).to_proto() for index in range(tokens // 256))
    message.tail.CopyFrom(PLAIN.blocks[0])
    del message.messages[:]
    message.messages.extend(
        manifest_pb2.Message(role="user", content=text[start : start + 100]) for start in range(0, len(text), 100)
    )
    parsed = manifest.parse(message.SerializeToString())
    assert len(parsed.token_ids) == tokens


def test_every_kind_of_layer_may_be_described() -> None:
    assert keeps_all_tokens(MIXED)
    only_state = identity_pb2.KvIdentity()
    only_state.CopyFrom(MIXED)
    del only_state.layers[0:2]
    assert not keeps_all_tokens(only_state)


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 100))
def test_a_cut_is_wholly_inside_and_never_inside_a_character(token_chars: list[int], chars: int) -> None:
    tokens = manifest.tokens_within_chars(token_chars, chars)
    assert sum(token_chars[:tokens]) <= chars
    assert tokens == 0 or token_chars[tokens - 1] > 0
    better = [
        n for n in range(tokens + 1, len(token_chars) + 1) if token_chars[n - 1] > 0 and sum(token_chars[:n]) <= chars
    ]
    assert better == []
