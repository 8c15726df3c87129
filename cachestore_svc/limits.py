"""Numbers and hashes from outside, checked before anything is done with them."""

from collections.abc import Mapping

from kvasir import expires_after, on_full
from kvasir.errors import InvalidArgument
from kvasir.formats.digest import is_hash

MAX_LABELS = 64
MAX_LABEL_CHARS = 256
# Rows are in no quota, and a fork copies none: an agent's labels stay small.
MAX_LABELS_BYTES = 4096


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


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidArgument for too many labels, and for one that is not short and printable."""
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(f"labels: expected at most {MAX_LABELS}, got {len(labels)}", field="labels")
    for name, value in labels.items():
        if not (1 <= len(name) <= MAX_LABEL_CHARS and name.isprintable()):
            raise InvalidArgument(
                f"labels: expected names of 1 to {MAX_LABEL_CHARS} printable characters", field="labels"
            )
        if len(value) > MAX_LABEL_CHARS or not value.isprintable():
            raise InvalidArgument(
                f"labels: expected values of at most {MAX_LABEL_CHARS} printable characters", field="labels"
            )
    if setting := labels.get(on_full.LABEL):
        on_full.from_label(setting)
    if setting := labels.get(expires_after.LABEL):
        expires_after.from_label(setting)
