"""The store's settings, as its parts want them: the options are in `kvasir.options.store`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvasir.options.finding import ConfigError, read
from kvasir.options.store import StoreFiles, StoreLimits, StoreRetention, StoreTable
from kvasir.server.serving import Listening

from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.sealing.sealed_list import read_list

__all__ = ("ConfigError", "StoreSettings", "read_settings")


class StoreSettings(StoreTable):
    def store_config(self) -> StoreConfig:
        """What a store is opened with. Raises FailedPrecondition (NAMESPACE_SEALED): `sealed_file` cannot be used."""
        parts = (StoreFiles, StoreRetention, StoreLimits)
        options: dict[str, Any] = {each.name: getattr(self, each.name) for part in parts for each in fields(part)}
        return StoreConfig(**options, sealed_namespaces=read_list(self.sealed_file))

    def listening(self) -> Listening:
        return Listening(
            address=self.listen,
            credentials_file=self.credentials_file,
            tls_cert_file=self.tls_cert_file,
            tls_key_file=self.tls_key_file,
            tls_client_ca_file=self.tls_client_ca_file,
            second_address=self.engine_listen,
        )


def read_settings(arguments: Mapping[str, object]) -> StoreSettings:
    return read(StoreSettings, arguments)
