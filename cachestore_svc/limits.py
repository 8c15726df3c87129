"""Numbers and hashes from outside, checked before anything is done with them."""

from kvasir.errors import InvalidArgument
from kvasir.formats.digest import is_hash


def check_range(field: str, value: float, least: float, most: float) -> None:
    """Raises InvalidArgument unless the value lies between the two, ends included."""
    if not least <= value <= most:
        raise InvalidArgument(f"{field}: expected {least:g} to {most:g}, got {value:g}", field=field)


def check_hash(text: str, field: str) -> None:
    """Raises InvalidArgument unless the text is 64 lower-case hex digits."""
    if not is_hash(text):
        raise InvalidArgument(f"{field}: expected 64 lower-case hex digits", field=field)


def check_text(text: str, field: str) -> None:
    """Raises InvalidArgument for text that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field}: expected text that UTF-8 can write", field=field) from None
