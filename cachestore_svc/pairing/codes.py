"""Codes that pair two Macs, and the line that has an address too. Eight of Crockford's 32 letters, 40 bits: too few for
a key, enough for a password that allows five wrong guesses. Pure text.
"""

from collections.abc import Callable

from kvasir.address import AddressError, parse_address
from kvasir.errors import InvalidArgument

# No I, L, O and U: the first three are read as digits, so that a code can be read over the telephone.
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LOOKS_LIKE = str.maketrans("ILO", "110")
_CODE_CHARS = 8
_LINE_PREFIX = "kvasir-pair:"


def new_code(random_bytes: Callable[[int], bytes]) -> str:
    """A fresh code, as it is shown: ABCD-EFGH. Each byte has 256 values, which 32 divides: no letter is likelier."""
    letters = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in random_bytes(_CODE_CHARS))
    return f"{letters[:4]}-{letters[4:]}"


def read_code(text: str) -> str:
    """The code as `new_code` shows it, however it was typed. Raises InvalidArgument, which does not repeat it."""
    letters = text.upper().replace("-", "").replace(" ", "").translate(_LOOKS_LIKE)
    if len(letters) != _CODE_CHARS or any(letter not in _ALPHABET for letter in letters):
        raise InvalidArgument.of("code", f"expected {_CODE_CHARS} letters and digits, as ABCD-EFGH")
    return f"{letters[:4]}-{letters[4:]}"


def line_of(code: str, address: str) -> str:
    return f"{_LINE_PREFIX}{code}@{address}"


def read_code_or_line(text: str) -> tuple[str, str]:
    """The code, and the address of a line or "". Raises InvalidArgument."""
    text = text.strip()
    if not text.startswith(_LINE_PREFIX):
        return read_code(text), ""
    code, _, address = text.removeprefix(_LINE_PREFIX).partition("@")
    return read_code(code), check_peer_address(address, "code")


def check_peer_address(text: str, field: str) -> str:
    """The address, if another machine could dial it: HOST:PORT of one host. Raises InvalidArgument."""
    try:
        address = parse_address(text)
    except AddressError as error:
        raise InvalidArgument.of(field, error) from None
    if address.is_everywhere:
        raise InvalidArgument.of(field, f"no other machine can dial {address.host}: expected one host's address")
    if address.socket_path is not None or address.port == 0:
        raise InvalidArgument.of(field, f"expected HOST:PORT of one host, got {text!r}")
    return str(address)
