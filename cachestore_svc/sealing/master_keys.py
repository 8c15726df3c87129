"""Where a master key is kept: in a file of its owner alone, or in the keychain of the operating system."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.credentials import CredentialFileError, read_private_text, write_private_text
from kvasir.errors import FailedPrecondition

from cachestore_svc.sealing.keys import KEY_BYTES, MasterKey
from cachestore_svc.sealing.sealed_form import RandomBytes

KEYCHAIN_SERVICE = "kvasir"
_SECRET = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


def from_file(path: Path) -> MasterKey:
    """The key in a file of 64 hex digits that only we may read. Raises FailedPrecondition (NAMESPACE_SEALED)."""
    try:
        return _master(read_private_text(path), f"the key file {path}")
    except CredentialFileError as error:
        raise _unusable(f"the key file {error}") from None


def make_file(path: Path, random_bytes: RandomBytes) -> MasterKey:
    """Write a new key into a file that is not there yet. Raises FailedPrecondition (NAMESPACE_SEALED)."""
    try:
        write_private_text(path, random_bytes(KEY_BYTES).hex() + "\n")
    except OSError as error:
        raise _unusable(f"the key file {path} cannot be made: {error.strerror}") from None
    return from_file(path)


def from_keychain(name: str) -> MasterKey:
    """The key that the keychain has under this name. Raises FailedPrecondition (NAMESPACE_SEALED)."""
    found = _asked(name, lambda chain: chain.get_password(KEYCHAIN_SERVICE, name))
    if found is None:
        raise _unusable(f"{_entry(name)} is not there")
    return _master(str(found), _entry(name))


def is_in_keychain(name: str) -> bool:
    """Whether the keychain has a key under this name. Raises FailedPrecondition (NAMESPACE_SEALED)."""
    return _asked(name, lambda chain: chain.get_password(KEYCHAIN_SERVICE, name)) is not None


def make_in_keychain(name: str, random_bytes: RandomBytes) -> MasterKey:
    """Put a new key into the keychain, under a name that it lacks. Raises FailedPrecondition (NAMESPACE_SEALED)."""
    secret = random_bytes(KEY_BYTES).hex()
    _asked(name, lambda chain: chain.set_password(KEYCHAIN_SERVICE, name, secret))
    return from_keychain(name)


def _entry(name: str) -> str:
    return f"the keychain's entry {KEYCHAIN_SERVICE}/{name}"


def _asked(name: str, question: Callable[[Any], object]) -> object:
    """The answer of the package `keyring`, which not everybody has."""
    try:
        chain = importlib.import_module("keyring")
    except ImportError:
        raise _unusable(f"{_entry(name)} needs the package keyring; run: pip install 'kvasir[keychain]'") from None
    try:
        return question(chain)
    except chain.errors.KeyringError as error:
        raise _unusable(f"{_entry(name)} cannot be used: {error}") from None


def _master(text: str, where: str) -> MasterKey:
    secret = text.strip()
    if _SECRET.fullmatch(secret) is None:
        raise _unusable(f"{where} holds no key: expected {2 * KEY_BYTES} hex digits")
    return MasterKey(bytes.fromhex(secret), where)


def _unusable(words: str) -> FailedPrecondition:
    return FailedPrecondition(words, reason="NAMESPACE_SEALED")
