"""The gateway's house with another Mac as its store's peer, to which agents move."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir.clients import StoreClient
from kvasir.credentials import CLIENT, PEER, Principal, write_private_text

from tests.cachestore.service.running import make_credentials, store_home
from tests.gateway.conftest import Front, running_front

PEER_NAME = "laptop"
_HERE = "studio"


@contextmanager
def front_with_peer(root: Path) -> Iterator[tuple[Front, StoreClient]]:
    """The house, whose namespace "first" may move agents to the peer, and a client of the peer's store."""
    principals = [Principal(_HERE, "first", frozenset({PEER})), Principal("owner", "first", frozenset({CLIENT}))]
    with store_home(root / PEER_NAME) as laptop:
        laptop.root.mkdir(parents=True, exist_ok=True)
        tokens = make_credentials(laptop.root / "credentials.toml", principals)
        here = _peers_file(root, PEER_NAME, laptop.socket, tokens[_HERE])
        with running_front(root / "house", store_options=("--peers-file", str(here))) as front:
            there = _peers_file(laptop.root, _HERE, front.house.store.address, front.keys[PEER_NAME])
            store = laptop.start(
                "--credentials-file", str(laptop.root / "credentials.toml"), "--peers-file", str(there)
            )
            with store.client(tokens["owner"]) as client:
                yield front, client


def _peers_file(root: Path, name: str, address: str, token: str) -> Path:
    """A list of one peer that may have and give all of "first"."""
    token_file, file = root / f"{name}.token", root / "peers.toml"
    write_private_text(token_file, token)
    rights = 'gives = ["first=claim"]\ntakes = ["first=move"]\n'
    write_private_text(file, f'[[peer]]\nname = "{name}"\naddress = "{address}"\ntoken_file = "{token_file}"\n{rights}')
    return file
