"""Values that a field may not be ready for, by the field's type: edges of numbers, names that mean something elsewhere,
text that some layer cannot write.
"""

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_F = FieldDescriptor
# Stands in a text where bytes shall stand that no text can hold; `wire.break_texts` puts them there.
BROKEN = "<broken!>"
BROKEN_BYTES = (
    b"\xed\xa0\x80" * 3,
    b"\xff\xfe\xfd" * 3,
    b"\xc0\xaf\xc0" * 3,
    b"\xf4\x90\x80" * 3,
    b"\xe2\x82" * 4 + b"a",
)

INTEGERS = (-1, 0, 1, 2, 255, 256, 257, 1000, 1001, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**53 + 1, 2**62)
_EDGES = (2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, -1.0, 1.0, 2.0, 1e-45, 3.4e38, math.inf, -math.inf, math.nan)
TEXTS = (
    *("", " ", "\0", "a\0b", "..", "../../../../etc/passwd", "/", "a/b", "\\\\host\\share", "%00", "%s%n", "a%", "_"),
    *("'; DROP TABLE agents; --", '"', "\n", "a\r\nb", "\x7f", "\x1b[31m", "-", "--help", "null", "nan", "None"),
    *("e\u0301", "\ufeff", "\u202e", "\u200b", "\u2028", "\ud7ff", "\U0010ffff", "\uffff", "💥" * 64, "é" * 128),
    *("a" * 128, "a" * 129, "a" * 256, "a" * 257, "a" * 5000, "0" * 64, "0" * 63, "0" * 65, "A" * 64, "０" * 64),
    *("0" * 64 + "\n", "g" * 64, BROKEN, f"a{BROKEN}b"),
    *("<|im_start|>", "<|im_end|>", "<|im_start|>system\n", "<think>", "<tool_call>", "</tool_call>", "<0x41>"),
    *("{}", "[]", "{", '"', "1e999", "NaN", '"\\ud800"', '{"a":"\\udc00"}', '{"a":1,"a":2}', "0" * 400, "-0"),
    *("[" * 1500, '{"a":' * 600, "[" * 1500 + "]" * 1500, '{"type":"object","properties":{"\\ud800":{}}}'),
    *("a{90000000}", "(a|aa)+$", "(?=a)", "\\1", "[", "(" * 200, "a*" * 300, "\\p{L}{1,900}", ".*\ud7ff"),
    *('{"$ref":"#"}', '{"$ref":"http://127.0.0.1/x"}', '{"type":"nothing"}', '{"enum":[]}', '{"const":"\\u0000"}'),
    *('{"type":"string","pattern":"("}', '{"type":"array","minItems":1000000000}', '{"minimum":1e999}', "true"),
)
BYTES = (b"", b"\0", b"\xff" * 9, b"{" * 64, bytes(8), b"\x08" + bytes(7) + b"{}      ", b"\xff" * 8, b"\0" * 70_000)

_LIMITS = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def values_for(field: FieldDescriptor) -> Sequence[Any]:
    """Hostile values that the field can hold in memory. A field of messages has none of its own."""
    kind = field.cpp_type
    if kind in _LIMITS:
        least, most = _LIMITS[kind]
        return [value for value in (*INTEGERS, *_EDGES) if least <= value <= most]
    if kind == _F.CPPTYPE_ENUM:
        return (-1, 0, 1, 2, 3, 7, 99, 2**31 - 1, -(2**31))
    if kind in (_F.CPPTYPE_FLOAT, _F.CPPTYPE_DOUBLE):
        return FLOATS
    if kind == _F.CPPTYPE_BOOL:
        return (False, True)
    if kind == _F.CPPTYPE_STRING:
        return BYTES if field.type == _F.TYPE_BYTES else TEXTS
    return ()
