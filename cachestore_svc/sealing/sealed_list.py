"""The owner's list of sealed namespaces, outside the data directory: it must outlive an emptied one."""

from collections.abc import Iterable
from pathlib import Path

from kvasir.credentials import CredentialFileError, read_private_text, replace_private_text
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.names import check_namespace


def read_list(path: Path | None) -> tuple[str, ...]:
    """The namespaces; none without a file. Raises FailedPrecondition (NAMESPACE_SEALED) for one that cannot be used."""
    if path is None or not path.exists():
        return ()
    try:
        return tuple(check_namespace(line) for line in read_private_text(path).splitlines() if line)
    except (CredentialFileError, InvalidArgument) as error:
        raise FailedPrecondition(f"the list of sealed namespaces: {error}", reason="NAMESPACE_SEALED") from None


def add_to_list(path: Path | None, namespaces: Iterable[str]) -> None:
    """Let the list have these, too. Raises FailedPrecondition (NAMESPACE_SEALED)."""
    listed = set(read_list(path))
    if path is None or listed.issuperset(namespaces):
        return
    try:
        replace_private_text(path, "".join(f"{each}\n" for each in sorted(listed.union(namespaces))))
    except OSError as error:
        raise FailedPrecondition(
            f"the list of sealed namespaces {path} cannot be written: {error.strerror}", reason="NAMESPACE_SEALED"
        ) from None
