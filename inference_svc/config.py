"""The engine's settings, as its parts want them: the options are in `kvasir.options.engine`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvasir.credentials import DEFAULT_NAMESPACE
from kvasir.errors import InvalidArgument
from kvasir.options.engine import EngineTable
from kvasir.options.finding import ConfigError, read
from kvasir.options.table import WrongOption
from kvasir.server.serving import Listening
from kvasir.waits import SOON_S

from inference_svc.first_model import add_command_line, named_model
from inference_svc.kv.policy import PolicyRequest
from inference_svc.memory.lines.line_parts import PublishingLimits
from inference_svc.model import kvasir_tiny
from inference_svc.turns.admission import AdmissionLimits
from inference_svc.turns.engine_parts import TurnLimits
from inference_svc.turns.progress import ReaderLimits

__all__ = ("ConfigError", "EngineSettings", "read_settings")

_COMMAND = "python -m inference_svc"
# Limits that are no options. The classes of the limits explain each.
_MAX_OPEN_PROMPT_BYTES = 256 << 20
_MAX_RESTORING_BYTES = 1 << 30
_KV_BACKLOG = 4.0
_STORE_MIN_BYTES_PER_S = 20e6
_SWAP_RENEW_S = 300.0


class EngineSettings(EngineTable):
    def check(self) -> None:
        super().check()
        names = [named_model(item)[0] for item in self.model]
        if len(set(names)) != len(names):
            raise WrongOption("model", "two models have the same name; give them others, as NAME=PATH")
        if self.embedding_model is not None and self.embedding_model[0] in self.models:
            raise WrongOption("embeddings", "a model has this name; give it another, as NAME=PATH")
        try:
            PolicyRequest.parse(self.kv_policy, self.kv_exact_layers)
        except InvalidArgument as error:
            raise WrongOption("kv_exact_layers", error.message) from None

    @property
    def models(self) -> dict[str, str]:
        return dict(map(named_model, self.model or [str(kvasir_tiny.path())]))

    @property
    def max_request_bytes(self) -> int:
        """Larger than a prompt may be, so that a prompt a little over the limit gets our error instead of gRPC's."""
        return 2 * self.max_prompt_bytes + (1 << 20)

    @property
    def admission(self) -> AdmissionLimits:
        most = -(-3 * self.max_turns // 4)
        return AdmissionLimits(
            max_turns=self.max_turns,
            max_turns_per_namespace=self.max_turns_per_namespace or most,
            max_turns_per_caller=self.max_turns_per_caller or most,
            kv_memory_bytes=0,
            max_open_prompt_bytes=max(_MAX_OPEN_PROMPT_BYTES, self.max_prompt_bytes),
            max_restoring_bytes=_MAX_RESTORING_BYTES,
            max_publishing_bytes=self.max_publishing_bytes,
            kv_backlog=_KV_BACKLOG,
        )

    @property
    def publishing(self) -> PublishingLimits:
        return PublishingLimits(
            commit_wait_s=self.commit_wait_s, timeout_s=self.publish_timeout_s, head_budget_s=SOON_S
        )

    @property
    def turn_limits(self) -> TurnLimits:
        return TurnLimits(
            store_budget_s=self.store_budget_ms / 1000,
            store_min_bytes_per_s=_STORE_MIN_BYTES_PER_S,
            publish_timeout_s=self.publish_timeout_s,
            swap_read_budget_s=SOON_S,
            swap_renew_s=_SWAP_RENEW_S,
            reader=ReaderLimits(self.max_unread_bytes, self.reader_stall_s),
        )

    @property
    def embedding_model(self) -> tuple[str, str] | None:
        return named_model(self.embeddings) if self.embeddings else None

    @property
    def listening(self) -> Listening:
        return Listening(
            address=self.listen,
            credentials_file=self.credentials_file,
            tls_cert_file=self.tls_cert_file,
            tls_key_file=self.tls_key_file,
            tls_client_ca_file=self.tls_client_ca_file,
        )

    def peer_tokens(self, name: str) -> dict[str, Path]:
        by_name = [(*key.rpartition("/")[::2], path) for key, path in self.peer_token_file.items()]
        return {namespace or DEFAULT_NAMESPACE: path for namespace, peer, path in by_name if peer == name}


def read_settings(arguments: Sequence[str]) -> EngineSettings:
    """Settings from the command line over the environment. Raises ConfigError; exits for --help and unknown options."""
    parser = argparse.ArgumentParser(prog=f"{_COMMAND} serve", description="Serve one model at a time over gRPC.")
    add_command_line(parser)
    given = vars(parser.parse_args(arguments))
    del given["command"]
    return read(EngineSettings, given)
