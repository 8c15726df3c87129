"""Numbers and hashes from outside, checked before anything is done with them."""

from collections.abc import Collection, Mapping

from kvasir import expires_after, on_full, volatile
from kvasir.errors import InvalidArgument
from kvasir.formats.digest import is_hash
from kvasir.names import check_agent_id

from cachestore_svc.facts.ownership import FIRST_MOVE
from cachestore_svc.facts.records import LineQuery

BELIEVED_S = 30.0  # what is read from the whole index, or of all agents, is believed for so long
MAX_LABELS = 64
MAX_LABEL_CHARS = 256
MAX_LABELS_BYTES = 4096  # rows are in no quota, and a fork copies none: an agent's labels stay small


wrong = InvalidArgument.of


def check_range(field: str, value: float, least: float, most: float) -> None:
    """Raises InvalidArgument unless the value lies between the two, ends included."""
    if not least <= value <= most:
        raise wrong(field, f"expected {least:g} to {most:g}, got {value:g}")


def check_hash(text: str, field: str = "kv_identity_hash") -> str:
    if not is_hash(text):
        raise wrong(field, "expected 64 lower-case hex digits")
    return text


def check_query(agent_id: str, kv_identity_hash: str | None = None) -> LineQuery:
    check_agent_id(agent_id)
    if kv_identity_hash is not None:
        check_hash(kv_identity_hash)
    return LineQuery(agent_id, kv_identity_hash)


def check_text(text: str, field: str) -> None:
    """Raises InvalidArgument for text that a catalog cannot look for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong(field, "expected text that UTF-8 can write") from None
    if "\0" in text:  # PostgreSQL's texts have none
        raise wrong(field, "expected text without a NUL")


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidArgument for too many labels, and for one that is not short and printable."""
    _check_count(labels.keys() - {FIRST_MOVE})
    check_label_texts(labels)
    if setting := labels.get(on_full.LABEL):
        on_full.from_label(setting)
    if setting := labels.get(volatile.LABEL):
        volatile.from_label(setting)
    if setting := labels.get(expires_after.LABEL):
        expires_after.from_label(setting)


def check_label_texts(labels: Mapping[str, str]) -> None:
    """Raises InvalidArgument for a label that is not short and printable."""
    for name, value in labels.items():
        if not (1 <= len(name) <= MAX_LABEL_CHARS and name.isprintable()):
            raise wrong("labels", f"expected names of 1 to {MAX_LABEL_CHARS} printable characters")
        if len(value) > MAX_LABEL_CHARS or not value.isprintable():
            raise wrong("labels", f"expected values of at most {MAX_LABEL_CHARS} printable characters")


def check_all_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidArgument for too many labels, or too long ones in all; the id of its first move does not count."""
    if len(labels.get(FIRST_MOVE, "")) > MAX_LABEL_CHARS:
        raise wrong(f"labels.{FIRST_MOVE}", f"expected at most {MAX_LABEL_CHARS} characters")
    counted = {name: value for name, value in labels.items() if name != FIRST_MOVE}
    _check_count(counted)
    if (size_bytes := sum(len(text.encode()) for label in counted.items() for text in label)) > MAX_LABELS_BYTES:
        raise wrong("labels", f"expected at most {MAX_LABELS_BYTES} bytes in all, got {size_bytes}")


def _check_count(names: Collection[str]) -> None:
    if len(names) > MAX_LABELS:
        raise wrong("labels", f"expected at most {MAX_LABELS}, got {len(names)}")
