"""Thoughts that callers keep for us, signed where they may be read, sealed where they may not, by our own key."""

import base64
import binascii
import hmac

from blake3 import blake3

_NONCE_BYTES = 12
_MARK = b"kvasir.thoughts.v1"


class ThoughtSeals:
    """Signs and seals with keys of their own, made of one of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        # Late: only who serves has seals.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key, self._of = key, dict[str, ThoughtSeals]()
        self._signing = blake3(_MARK + b" signature", key=key).digest()
        self._sealing = AESGCM(blake3(_MARK + b" seal", key=key).digest())
        self._numbering = blake3(_MARK + b" nonce", key=key).digest()

    def of(self, namespace: str) -> "ThoughtSeals":
        """Those of one namespace. Another's open and know nothing of theirs."""
        if namespace not in self._of:
            self._of[namespace] = ThoughtSeals(blake3(_MARK + namespace.encode(), key=self._key).digest())
        return self._of[namespace]

    def signature(self, text: str) -> str:
        digest = blake3(text.encode("utf-8", "surrogatepass"), key=self._signing).digest()
        return base64.b64encode(_MARK + digest).decode()

    def is_ours(self, text: str, signature: object) -> bool:
        return isinstance(signature, str) and hmac.compare_digest(signature.encode(), self.signature(text).encode())

    def sealed(self, text: str) -> str:
        """Equal texts look equal: the nonce is made of the text, and no two texts share one."""
        data = text.encode("utf-8", "replace")
        nonce = blake3(data, key=self._numbering).digest(_NONCE_BYTES)
        return base64.b64encode(nonce + self._sealing.encrypt(nonce, data, _MARK)).decode()

    def opened(self, sealed: object) -> str | None:
        """The text; None for what this gateway has not sealed."""
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.b64decode(sealed if isinstance(sealed, str) else "", validate=True)
            return self._sealing.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _MARK).decode()
        except (InvalidTag, ValueError, binascii.Error):
            return None
