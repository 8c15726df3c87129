"""Bytes instead of messages: truncated, doubled, flipped, garbage, and texts that are no UTF-8."""

from tests.campaigns.fuzz import hostile
from tools.kvasir_tiny.words import Dice

_DEEP = 150  # beyond what protobuf follows
_UNKNOWN_FIELDS = (b"\xfa\x7f\x03abc", b"\xf8\x7f\x01", b"\x0b\x0c", b"\x0c", b"\x07", b"\x00\x01", b"\xff" * 11)


def break_texts(data: bytes, dice: Dice) -> bytes:
    """Put bytes that are no UTF-8 (a surrogate, an overlong form …) where the message says so."""
    return data.replace(hostile.BROKEN.encode(), dice.pick(hostile.BROKEN_BYTES))


def damage(data: bytes, dice: Dice) -> bytes:
    """The bytes, in one way wrong."""
    how = dice.below(7)
    if how == 0:
        return data[: dice.below(len(data) + 1)]
    if how == 1:
        return data + data
    if how == 2 and data:
        place, changed = dice.below(len(data)), bytearray(data)
        changed[place] ^= 1 << dice.below(8)
        return bytes(changed)
    if how == 3:
        return data + dice.pick(_UNKNOWN_FIELDS)
    if how == 4:
        return bytes(dice.below(256) for _ in range(dice.pick([1, 7, 200])))
    if how == 5:  # groups in groups
        return b"\x0b" * _DEEP + b"\x0c" * _DEEP + data
    if not data:
        return b"\x0a\xff\xff\xff\xff\x0f"  # four gigabytes, it says
    place = dice.below(len(data))
    return data[:place] + data[place + 1 + dice.below(4) :]
