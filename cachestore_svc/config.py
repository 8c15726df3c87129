"""The store's settings, as its parts want them: the options are in `kvasir.options.store`."""

from collections.abc import Mapping

from kvasir.options.finding import ConfigError, read
from kvasir.options.store import StoreTable
from kvasir.server.serving import Listening

from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.sealing.sealed_list import read_list

__all__ = ("ConfigError", "StoreSettings", "read_settings")


_BALLAST_BYTES = 16 << 20  # A file given up when the disk is full, so that deletes still have room for the index
_EVENT_HISTORY = 10_000  # kept per namespace, for watchers that come back


class StoreSettings(StoreTable):
    def store_config(self) -> StoreConfig:
        """What a store is opened with. Raises FailedPrecondition (NAMESPACE_SEALED): `sealed_file` cannot be used."""
        return StoreConfig(
            data_dir=self.data_dir,
            default_quota_bytes=self.quota_bytes,
            namespace_quota_bytes=self.namespace_quota_bytes,
            evict_heads=self.evict_heads,
            free_disk_reserve_bytes=self.free_disk_reserve_bytes,
            ballast_bytes=_BALLAST_BYTES,
            max_blob_bytes=self.max_blob_bytes,
            grace_period_s=self.grace_period_s,
            retained_versions=self.retained_versions,
            event_history=_EVENT_HISTORY,
            write_budget_bytes=self.write_budget_bytes,
            refuses_beyond_budget=self.write_budget_over == "refuse",
            default_expires_after_s=self.expires_after_s,
            namespace_expires_after_s=self.namespace_expires_after_s,
            sealed_namespaces=read_list(self.sealed_file),
            last_runs_dir=self.last_runs_dir,
            accept_older=self.accept_older,
        )

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
