"""A house whose services know their callers: one credential file for both, and the engine's own tokens at its store."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvasir.credentials import ENGINE, Principal, write_credentials, write_private_text

from tests.running.system_fixtures import House


def guarded(house: House, principals: Sequence[Principal]) -> Mapping[str, str]:
    """Make both services of a house that is not started yet ask for credentials; name → token.

    Beside the principals, each of their namespaces has an engine of its own name, as whom the engine asks its store.
    """
    namespaces = sorted({principal.namespace for principal in principals})
    engines = [Principal(_engine_of(name), name, frozenset({ENGINE})) for name in namespaces]
    file = house.root / "credentials.toml"
    numbers = iter(range(1000))
    tokens = write_credentials(file, [*principals, *engines], lambda: f"token-{next(numbers)}-{'x' * 32}")
    house.store.options += ["--credentials-file", str(file)]
    house.engine.options += ["--credentials-file", str(file), *_store_tokens(house.root, namespaces, tokens)]
    return tokens


def _store_tokens(root: Path, namespaces: Iterable[str], tokens: Mapping[str, str]) -> Iterable[str]:
    for namespace in namespaces:
        file = root / f"{_engine_of(namespace)}.token"
        write_private_text(file, tokens[_engine_of(namespace)])
        yield from ("--store-token-file", f"{namespace}={file}")


def _engine_of(namespace: str) -> str:
    return f"engine-of-{namespace}"
