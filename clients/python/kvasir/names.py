"""Names that come from outside: data, never part of a path; refused if Unicode could write or hide them otherwise."""

import re
import unicodedata

from kvasir.errors import InvalidArgument

MAX_NAME_BYTES = 256
MAX_REQUEST_ID_CHARS = 128
# Of conversations for which the gateway's callers and the engine's neighbours name no agent.
UNNAMED_PREFIXES = ("conversation/", "tokens/")
# Of agents that Kvasir names itself: these, and a recovery's.
RESERVED_PREFIXES = (*UNNAMED_PREFIXES, "recovered-")

# Control, format (zero-width, bidi), surrogate; line and paragraph separators.
_REFUSED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_PRINTABLE_ASCII = re.compile(rf"[\x20-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")


def check_agent_id(name: str, field: str = "agent_id") -> str:
    """The name, if it is 1 to 256 bytes of NFC UTF-8 without control characters; else InvalidArgument."""
    # Length first: a megabyte of name is not worth normalising. A code point takes at least one byte.
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        raise InvalidArgument.of(field, f"expected 1 to {MAX_NAME_BYTES} bytes of UTF-8, got {len(name)} characters")
    for position, character in enumerate(name):
        if unicodedata.category(character) in _REFUSED_CATEGORIES:
            raise InvalidArgument.of(field, f"control character U+{ord(character):04X} at position {position}")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument.of(field, f"expected 1 to {MAX_NAME_BYTES} bytes of UTF-8, got {len(name.encode())}")
    if not unicodedata.is_normalized("NFC", name):
        raise InvalidArgument.of(field, "expected Unicode normal form C (NFC)")
    return name


def check_namespace(name: str, field: str = "namespace") -> str:
    """As check_agent_id, for the isolation boundary that a credential is bound to."""
    return check_agent_id(name, field)


def check_request_id(text: str, field: str = "request_id") -> str:
    """The text, if it is 1 to 128 printable ASCII characters. Raises InvalidArgument naming `field`."""
    if _PRINTABLE_ASCII.fullmatch(text) is None:
        raise InvalidArgument.of(field, f"expected 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return text


def check_owner(text: str, field: str = "owner") -> str:
    """The text, if it may own a lease: 1 to 128 printable ASCII characters. Raises InvalidArgument naming `field`."""
    return check_request_id(text, field)
