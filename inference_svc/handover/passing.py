"""What passes between two engines when a turn goes from one to the other: plain data, and the link that carries it."""

from dataclasses import dataclass, fields
from typing import Protocol

from kvasir.errors import FailedPrecondition
from kvasir.formats.block_file import FileBytes

from inference_svc.engine.api import CarriedTurn
from inference_svc.engine.engine import Engine
from inference_svc.turns.phases import BegunTurn


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What must be alike in both engines for the next token to be the same one."""

    kv_identity_hash: str
    tokenizer_digest: str
    template_digest: str
    device: str
    compute_type: str
    cell_tokens: int
    version: str  # of Kvasir
    sampling_defaults: str = ""  # as text

    @classmethod
    def of(cls, engine: Engine, version: str) -> "Surroundings":
        model = engine.model
        return cls(
            model.kv_identity_hash,
            model.tokenizer_digest,
            model.template_digest,
            engine.device,
            model.compute_type,
            model.cell_tokens,
            version,
            " ".join(f"{name}={value!r}" for name, value in sorted(model.sampling_defaults.items())),
        )

    def check_alike(self, theirs: "Surroundings") -> None:
        """Raise FailedPrecondition (HANDOVER_NOT_ALIKE) that names what differs."""
        for field in fields(self):
            ours, other = getattr(self, field.name), getattr(theirs, field.name)
            if ours != other:
                raise FailedPrecondition(
                    f"surroundings.{field.name}: this engine has {ours}, the turn was begun with {other}; it "
                    "ends where it is",
                    reason="HANDOVER_NOT_ALIKE",
                    field=f"opening.surroundings.{field.name}",
                )


@dataclass(frozen=True, slots=True)
class Opening:
    surroundings: Surroundings
    origin: object  # the request, as the edge knows it
    request_id: str
    caller: str
    begun: BegunTurn
    choices: tuple[int, ...]  # those that still speak


@dataclass(frozen=True, slots=True)
class Stand:
    """Where one choice stands between two tokens; `files` follow."""

    choice: int
    carried: CarriedTurn
    told_chars: int
    files: int


@dataclass(frozen=True, slots=True)
class Promise:
    """The other engine holds all of a request's turns. Its token is for the reader of the rest."""

    resume_token: str
    expires_s: float


class PeerLink(Protocol):
    """A way to one peer for one request's turns. All methods raise KvasirError, also after the link broke."""

    async def open(self, opening: Opening) -> None:
        """Returns when the peer would take the turns."""

    async def send_file(self, choice: int, data: FileBytes) -> None: ...

    async def send_stand(self, stand: Stand) -> None: ...

    async def prepared(self) -> Promise:
        """Returns when the peer holds everything."""

    async def commit(self) -> None:
        """Give the turns away. After an error nobody knows here whether the peer has them."""
