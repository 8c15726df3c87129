"""A store with one sealed namespace and one plain one, and the care of its keys."""

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.recovery.key_care import KeyCare
from cachestore_svc.sealing.keys import MasterKey
from tests.cachestore.core.lab import Lab, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot

PLAIN_NS = "other"


def left_behind(lab: Lab) -> tuple[SyntheticSnapshot, SyntheticSnapshot]:
    """A store with one agent in a sealed namespace and one in a plain one."""
    ours, theirs = SyntheticAgent(SMALL, 1).turn(300), SyntheticAgent(SMALL, 2).turn(300)
    with lab.open() as store:
        publish(store, "ada", ours, 0)
        publish(store, "bob", theirs, 0, PLAIN_NS)
    return ours, theirs


def care(lab: Lab, disk: Disk | None = None, **settings: object) -> KeyCare:
    return KeyCare(lab.config(**settings), lab.means(disk))


NEW = MasterKey(b"n" * 32, "the new file")
