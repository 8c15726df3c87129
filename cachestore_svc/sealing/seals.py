"""Which namespaces of a data directory are sealed, and the keys of those that the given master keys open. One that no
key opens is shut: requests are refused, and what needs no key is looked after all the same.
"""

from collections.abc import Iterable, Sequence

from kvasir.errors import FailedPrecondition
from kvasir.formats.blob_place import namespace_place

from cachestore_svc.sealing.key_files import Records
from cachestore_svc.sealing.keys import MasterKey, NamespaceKey, sealed_error
from cachestore_svc.sealing.sealed_names import PLAIN_NAMES, PlainNames

_LOST = (
    "its key record keys/{0} is missing or damaged: put it back; or, if nothing of it is left, seal it again with "
    "kvasir keys new"
)


class Seals:
    """The seals of an open store. They do not change once it is open."""

    def __init__(self, records: Records, masters: Sequence[MasterKey], listed: Iterable[str] = ()) -> None:
        """`listed`: namespaces that must be sealed, whatever the data directory has."""
        self._keys: dict[str, NamespaceKey] = {}
        self._shut: dict[str, FailedPrecondition] = {}  # and why
        self._lost = {place for place, record in records.items() if record is None}
        self.recorded = frozenset(records.keys() - self._lost)  # places
        self.namespaces = tuple(sorted(record.namespace for record in records.values() if record is not None))
        self._listed = tuple(listed)
        self.lose(map(namespace_place, self._listed))
        for place, record in records.items():
            if record is not None:
                try:
                    self._keys[place] = NamespaceKey(record.open(masters))
                except FailedPrecondition as error:
                    self._shut[place] = error

    def lose(self, places: Iterable[str]) -> None:
        """These must be sealed: of those that have no record, it was lost."""
        self._lost |= set(places) - self.recorded

    def key_of(self, namespace: str) -> NamespaceKey | None:
        return self._keys.get(namespace_place(namespace))

    def names_of(self, namespace: str) -> PlainNames:
        """How a namespace has its names in the index; as they are, where it is not sealed, or shut."""
        key = self.key_of(namespace) if self._keys else None
        return PLAIN_NAMES if key is None else key.names

    def plain(self, namespace: str, text: str) -> str:
        """A text about a namespace with the names in it opened, where they are sealed and the key is here."""
        return self.names_of(namespace).open_text(text)

    def refusal(self, namespace: str) -> FailedPrecondition | None:
        """Why the namespace is shut (NAMESPACE_SEALED, with what to do); None when it is open, sealed or not."""
        if not self._lost and not self._shut:
            return None
        place = namespace_place(namespace)
        if place in self._lost:
            return sealed_error(namespace, _LOST.format(place))
        return _as_error(self._shut[place]) if place in self._shut else None

    def check_open(self, namespace: str) -> None:
        if (error := self.refusal(namespace)) is not None:
            raise error

    def refusals(self) -> list[FailedPrecondition]:
        return [*map(_as_error, self._shut.values()), *self.lost()]

    def lost(self) -> list[FailedPrecondition]:
        """One for each namespace whose record is missing or damaged. The place is often all that is known of it."""
        names = {namespace_place(name): name for name in self._listed}
        return [sealed_error(names.get(place, place), _LOST.format(place)) for place in sorted(self._lost)]


def _as_error(why: FailedPrecondition) -> FailedPrecondition:
    """A new one each time: an error that is raised again and again keeps every traceback."""
    return FailedPrecondition(why.message, reason="NAMESPACE_SEALED", metadata=why.metadata)
