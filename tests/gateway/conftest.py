"""A house of two namespaces with a gateway before it, shared by the tests of this folder that kill nothing.

The SDKs take seconds to import: only the process that runs their tests does it.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import GatewayProcess, running_gateway, write_keys
from tests.made_models.tiny_encoder import write_encoder
from tests.running.system_fixtures import House

NO_RETRIES = 0
# The model that only embeds, beside kvasir-tiny.
ENCODER = "words"
# The one site whose pages may call.
ORIGIN = "https://app.example"


@dataclass(frozen=True)
class Front:
    """Services, the gateway before them, and a key for each caller."""

    house: House
    gateway: GatewayProcess
    keys: dict[str, str]

    def openai(self, caller: str = "ada", *, is_strict: bool = True, **headers: str) -> Any:
        from openai import OpenAI

        return OpenAI(
            base_url=f"{self.gateway.url}/v1",
            api_key=self.keys[caller],
            max_retries=NO_RETRIES,
            default_headers=headers,
            _strict_response_validation=is_strict,
        )

    def anthropic(self, caller: str = "ada", **headers: str) -> Any:
        from anthropic import Anthropic

        return Anthropic(
            base_url=self.gateway.url,
            api_key=self.keys[caller],
            max_retries=NO_RETRIES,
            default_headers=headers,
            _strict_response_validation=True,
        )

    def failures(self) -> str:
        """What the services and the gateway logged of bugs: types and places."""
        logs = (self.house.store.log, self.house.engine.log, self.gateway.log)
        return "\n".join(line for log in logs for line in log.splitlines() if ".failed" in line)

    def bearer(self, caller: str = "ada") -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[caller]}"}


@contextmanager
def running_front(
    root: Path,
    *,
    model: Path | None = None,
    engine: str = "inference_svc",
    store_options: Sequence[str] = (),
    engine_options: Sequence[str] = (),
    gateway_options: Sequence[str] = (),
) -> Iterator[Front]:
    house = House(root, model, engine_options=engine_options)
    house.engine.program = engine
    house.store.options += store_options
    keys = write_keys(root / "credentials.toml")
    for service in (house.store, house.engine):
        service.options += ["--credentials-file", str(root / "credentials.toml")]
    for namespace in ("first", "second"):
        token = root / f"{namespace}.token"
        token.touch(mode=0o600)
        token.write_text(keys[f"engine-{namespace}"])
        house.engine.options += ["--store-token-file", f"{namespace}={token}"]
    try:
        house.start()
        options = ("--credentials", str(root / "credentials.toml"), "--origin", ORIGIN, *gateway_options)
        with running_gateway(house, *options) as gateway:
            yield Front(house, gateway, keys)
    finally:
        house.close()


@pytest.fixture(scope="session")
def openai() -> Any:
    return importlib.import_module("openai")


@pytest.fixture(scope="session")
def anthropic() -> Any:
    return importlib.import_module("anthropic")


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    encoder = write_encoder(tmp_path_factory.mktemp("words") / "encoder")
    options = ("--embeddings", f"{ENCODER}={encoder}")
    with running_front(tmp_path_factory.mktemp("front"), engine_options=options) as front:
        yield front


@pytest.fixture(scope="session")
def strict(front: Front) -> Iterator[Front]:
    """The same services behind a gateway that ignores nothing."""
    options = ("--credentials", str(front.house.root / "credentials.toml"), "--strict", "--volatile", "none")
    options += ("--alias", "gpt-4o=kvasir-tiny", "--alias", "claude-sonnet=kvasir-tiny")
    with running_gateway(front.house, *options, name="strict") as gateway:
        yield replace(front, gateway=gateway)


@pytest.fixture
def own_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """For tests that kill."""
    with running_front(tmp_path_factory.mktemp("own")) as front:
        yield front
