"""The exchange of certificates under a code, as steps of bytes: no network, no files, clock and randomness passed in.

Both sides run SPAKE2 over the code, so that each guess takes a run of the exchange with a side that knows the code.
Every later message is sealed (AES-256-GCM) under a key of its own, derived from SPAKE2's key and all that was sent
before: whoever changed, left out or repeated a message cannot go on. The joiner proves the code first, so that a host
reveals nothing to somebody who guesses. The last messages are signatures by the keys of the certificates.

    joiner                            host
    share                        →
                                 ←    share
    sealed card                  →    opens: the joiner knows the code, else a guess is counted
                                 ←    sealed card
    opens: the host knows it
    sealed signature             →    pins
    pins                         ←    sealed signature
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import DecodeError
from kvasir.cachestore.v1 import pairing_pb2
from kvasir.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from cachestore_svc.pairing.codes import check_peer_address
from cachestore_svc.pairing.identity import Certificate, Identity

PROTOCOL = 1
MAX_WRONG_GUESSES = 5
LIFETIME_S = 600.0
PEER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LABEL = b"kvasir pairing 1"
_HOST, _JOINER = b"host", b"joiner"
_SHARE_BYTES = 33  # the side and a point of Ed25519
_MAX_SEALED_BYTES = 8192
_NONCE = bytes(12)  # a key seals one message

RandomBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Card:
    """A store's own facts: the name that it proposes, its certificate, and where it and its engine listen to
    peers, or ""."""

    name: str
    certificate: Certificate
    address: str
    engine_address: str = ""

    def to_bytes(self) -> bytes:
        addresses = {"address": self.address, "engine_address": self.engine_address}
        card = pairing_pb2.PeerCard(name=self.name, certificate=self.certificate.der, **addresses)
        return card.SerializeToString()

    @classmethod
    def read(cls, data: bytes) -> "Card":
        try:
            card = pairing_pb2.PeerCard.FromString(data)
        except DecodeError:
            raise InvalidArgument.of("card", "expected a PeerCard", reason="PAIRING_MALFORMED") from None
        if PEER_NAME.fullmatch(card.name) is None:
            raise InvalidArgument.of("card.name", "expected 1 to 64 of A-Z a-z 0-9 . _ -")
        certificate = Certificate.read(card.certificate, "card.certificate")
        address, engine_address = (
            check_peer_address(text, f"card.{field}") if text else ""
            for field, text in (("address", card.address), ("engine_address", card.engine_address))
        )
        return cls(card.name, certificate, address, engine_address)


class Invitation:
    """A code while it may be used: once, for some minutes, until five guesses were wrong."""

    def __init__(self, code: str, clock: Callable[[], float], lifetime_s: float = LIFETIME_S) -> None:
        self.code = code
        self._clock = clock
        self._ends_s = clock() + lifetime_s
        self._wrong_guesses = 0
        self.is_used = False

    @property
    def guesses_left(self) -> int:
        return MAX_WRONG_GUESSES - self._wrong_guesses

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._ends_s - self._clock())

    @property
    def is_over(self) -> bool:
        return self.is_used or self.guesses_left <= 0 or self.seconds_left <= 0

    def check(self) -> None:
        """Raises FailedPrecondition when the code is over. It gives no reason: that would show others' guesses."""
        if self.is_over:
            raise FailedPrecondition(
                "no code is valid here any more: begin again with `kvasir pair`", reason="PAIRING_OVER"
            )

    def guessed(self, is_right: bool) -> None:
        """Count a guess. Raises PermissionDenied for a wrong one."""
        self.check()
        if is_right:
            self.is_used = True
            return
        self._wrong_guesses += 1
        raise PermissionDenied(
            f"a wrong code, or a machine in the middle; {self.guesses_left} guesses are left",
            reason="PAIRING_REFUSED",
            metadata={"guesses_left": str(self.guesses_left)},
        )


class _Side:
    """What both sides do: the key of SPAKE2, and messages sealed under all before. Call each step once, in order."""

    own, other = b"", b""  # whose messages these are

    def __init__(self, spake: Any, identity: Identity) -> None:
        self._spake = spake
        self._identity = identity
        self._key = b""
        self._said = hashlib.sha256(_LABEL).digest()
        self._card: Card | None = None
        self.share: bytes = spake.start()

    def take_share(self, share: bytes) -> None:
        malformed = InvalidArgument.of("share", "expected SPAKE2's", reason="PAIRING_MALFORMED")
        if len(share) != _SHARE_BYTES:
            raise malformed
        try:
            self._key = self._spake.finish(share)
        except (SPAKEError, NotOnCurve, ValueError):
            raise malformed from None
        shares = {self.own: self.share, self.other: share}
        self._say(shares[_JOINER])
        self._say(shares[_HOST])

    def card(self, own: Card) -> bytes:
        return self._seal(self.own + b"'s card", own.to_bytes())

    def signature(self) -> bytes:
        label = self.own + b"'s signature"
        return self._seal(label, self._identity.sign(label + self._said))

    def take_signature(self, sealed: bytes) -> None:
        """Now the other side may be pinned, or has pinned this one. Raises PermissionDenied."""
        assert self._card is not None, "the card comes first"
        label = self.other + b"'s signature"
        signed = label + self._said
        signature = self._open(label, sealed)
        if signature is None or not self._card.certificate.has_signed(signature, signed):
            raise PermissionDenied("the other side has not the key of its certificate", reason="PAIRING_REFUSED")

    def _say(self, message: bytes) -> None:
        self._said = hashlib.sha256(self._said + len(message).to_bytes(4, "big") + message).digest()

    def _aead(self, label: bytes) -> AESGCM:
        return AESGCM(HKDF(hashes.SHA256(), 32, salt=self._said, info=_LABEL + b" " + label).derive(self._key))

    def _seal(self, label: bytes, plain: bytes) -> bytes:
        sealed = self._aead(label).encrypt(_NONCE, plain, None)
        self._say(sealed)
        return sealed

    def _open(self, label: bytes, sealed: bytes) -> bytes | None:
        """The plain bytes; None when they were sealed by somebody else, or after something else."""
        if len(sealed) > _MAX_SEALED_BYTES:
            return None
        try:
            plain = self._aead(label).decrypt(_NONCE, sealed, None)
        except InvalidTag:
            return None
        self._say(sealed)
        return plain


class Hosting(_Side):
    own, other = _HOST, _JOINER

    def __init__(self, invitation: Invitation, identity: Identity, random_bytes: RandomBytes) -> None:
        invitation.check()
        super().__init__(SPAKE2_A(invitation.code.encode(), entropy_f=random_bytes), identity)
        self._invitation = invitation

    def take_card(self, sealed: bytes) -> Card:
        """The joiner's card: from now on the code is used. Raises PermissionDenied: a wrong code, which is counted."""
        plain = self._open(b"joiner's card", sealed)
        self._invitation.guessed(is_right=plain is not None)
        assert plain is not None, "a wrong guess raises"
        self._card = Card.read(plain)
        return self._card


class Joining(_Side):
    own, other = _JOINER, _HOST

    def __init__(self, code: str, identity: Identity, random_bytes: RandomBytes) -> None:
        super().__init__(SPAKE2_B(code.encode(), entropy_f=random_bytes), identity)

    def take_card(self, sealed: bytes) -> Card:
        """The host's card. Raises PermissionDenied: it was not sealed by one who knows the code."""
        plain = self._open(b"host's card", sealed)
        if plain is None:
            text = "the other side does not know the code: a machine in the middle?"
            raise PermissionDenied(text, reason="PAIRING_REFUSED")
        self._card = Card.read(plain)
        return self._card
