"""The names, texts and hashes of a sealed namespace as its files and its index have them: equal ones have equal forms
(AES-256-SIV), which show nothing without the key. A digest becomes another, which the key turns back; chain and block
hashes are hashed once more, with a key. Pure.
"""

import base64
import re
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from kvasir.formats.digest import Digest

_TEXT = re.compile(r"sealed-([a-z]+)\.([A-Za-z0-9_-]+)")
_REMEMBERED = 1 << 16
_HASH_HEX = 64
# Kinds of texts; see PlainNames.text.
AGENT, LABEL, VALUE, DETAIL, REQUEST = "agent", "label", "value", "detail", "request"


class PlainNames:
    """The names of a namespace that is not sealed: they stay what they are."""

    keep_order = True  # names sort as their forms in the tables do

    def hash(self, hash_: str) -> str:
        """The name of a digest's file, and its hash in the index: 64 hex digits as well."""
        return self.hashes([hash_])[0]

    def hashes(self, hashes: Iterable[str]) -> list[str]:
        return list(hashes)

    def open_hashes(self, sealed: Iterable[str]) -> list[str]:
        return list(sealed)

    def digest(self, digest: Digest) -> Digest:
        return Digest(self.hash(digest.hash), digest.size_bytes)

    def open_digest(self, digest: Digest) -> Digest:
        [hash_] = self.open_hashes([digest.hash])
        return Digest(hash_, digest.size_bytes)

    def keyed(self, hash_: str) -> str:
        return hash_

    def text(self, kind: str, text: str) -> str:  # noqa: ARG002
        return text

    def open_text(self, text: str) -> str:
        return text


class SealedNames(PlainNames):
    """Seals and opens names with a namespace's key. From any thread."""

    keep_order = False

    def __init__(self, key: bytes) -> None:
        self._texts = AESSIV(blake3(b"texts", key=key).digest(length=64))
        self._keyed = blake3(b"hashes", key=key).digest()
        # A digest is two blocks of AES that no other digest has: there is no pattern that ECB could show.
        cipher = Cipher(AES256(blake3(b"digests", key=key).digest()), ECB())  # noqa: S305
        self._sealer, self._opener = cipher.encryptor(), cipher.decryptor()
        self._lock = threading.Lock()
        self._sealed: Callable[[str, str], str] = lru_cache(_REMEMBERED)(self._seal)
        self._opened: Callable[[str, str, str], str] = lru_cache(_REMEMBERED)(self._open)

    def hashes(self, hashes: Iterable[str]) -> list[str]:
        with self._lock:
            return _cut(self._sealer.update(bytes.fromhex("".join(hashes))))

    def open_hashes(self, sealed: Iterable[str]) -> list[str]:
        with self._lock:
            return _cut(self._opener.update(bytes.fromhex("".join(sealed))))

    def keyed(self, hash_: str) -> str:
        """What stands for a chain or block hash. It cannot be turned back."""
        return blake3(hash_.encode(), key=self._keyed).hexdigest()

    def text(self, kind: str, text: str) -> str:
        """A text of a kind (lower-case letters), sealed; the empty text stays empty."""
        return self._sealed(kind, text) if text else ""

    def open_text(self, text: str) -> str:
        """The text with its sealed parts opened. A part that this key does not open stays as it is."""
        return _TEXT.sub(lambda found: self._opened(found[0], found[1], found[2]), text)

    def _seal(self, kind: str, text: str) -> str:
        sealed = self._texts.encrypt(text.encode(), [kind.encode()])
        return f"sealed-{kind}.{base64.urlsafe_b64encode(sealed).decode().rstrip('=')}"

    def _open(self, token: str, kind: str, sealed: str) -> str:
        try:
            data = base64.urlsafe_b64decode(sealed + "=" * (-len(sealed) % 4))
            return self._texts.decrypt(data, [kind.encode()]).decode()
        except (InvalidTag, ValueError):
            return token


PLAIN_NAMES = PlainNames()


def _cut(hashes: bytes) -> list[str]:
    digits = hashes.hex()
    return [digits[at : at + _HASH_HEX] for at in range(0, len(digits), _HASH_HEX)]
