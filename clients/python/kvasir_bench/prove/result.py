"""The result of a proof: one JSON value without names or paths of a person, with a digest and a signature.

The digest is BLAKE3 of the result's canonical JSON. The signature is Ed25519 over the digest, by a key that lies in
the home. It shows that nothing was changed since, and that results with one public key come from one home. It does not
show whose home that is, nor that the machine measured truthfully: the owner of a key can sign anything."""

import base64
import contextlib
import datetime
import getpass
import json
import platform
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from kvasir.credentials import read_private_text, replace_private_text
from kvasir.errors import InvalidArgument

KIND, FORMAT = "kvasir-prove", 1
_SEAL = ("digest", "public_key", "signature")
# Absolute, or of a home; http://host/a/b is none. A name may have blanks where a further slash follows.
_NAME = r"[^\s/'\":;,)]+"
_FOLDER = rf"/{_NAME}(?: {_NAME})*(?=/)"
_PATH = re.compile(rf"file:/[^\s'\":;,)]+|(?<![\w/.])(?:~\w*(?:{_FOLDER})*|(?!//)(?:{_FOLDER})+)/{_NAME}/?")


def result_of(
    records: Sequence[Mapping[str, Any]], made_with: Mapping[str, Any], day: datetime.date, words: Collection[str]
) -> dict[str, Any]:
    """Not signed yet. `words` are names of the person and the machine, which no sentence of it contains afterwards."""
    head = {"kind": KIND, "format": FORMAT, "day": day.isoformat(), "made_with": dict(made_with)}
    return {**head, "steps": impersonal(list(records), words)}


def personal_words() -> set[str]:
    """Names of this user and this host. Short ones and root could be any word, and are nobody's."""
    names = {socket.gethostname(), platform.node(), platform.node().split(".")[0], Path.home().name}
    with contextlib.suppress(KeyError, OSError):  # a user without an entry, as in containers
        names.add(getpass.getuser())
    return {name for name in names if len(name) > 2 and name not in ("root", "localhost", "runner", "user")}


def impersonal(value: Any, words: Collection[str]) -> Any:
    """The same JSON with PATH for each path and, in sentences, NAME for each of the words."""
    if isinstance(value, Mapping):
        return {key: impersonal(found, words) for key, found in value.items()}
    if isinstance(value, list | tuple):
        return [impersonal(found, words) for found in value]
    if not isinstance(value, str):
        return value
    text = _PATH.sub("PATH", value)
    for word in sorted(words, key=len, reverse=True) if " " in text else ():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "NAME", text, flags=re.IGNORECASE)
    return text


def signed(result: Mapping[str, Any], key_file: Path) -> dict[str, Any]:
    """With digest, public key and signature. The key is made at the first need."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not key_file.exists():
        replace_private_text(key_file, Ed25519PrivateKey.generate().private_bytes_raw().hex())
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(read_private_text(key_file).strip()))
    digest = digest_of(result)
    return {
        **result,
        "digest": digest,
        "public_key": _text(key.public_key().public_bytes_raw()),
        "signature": _text(key.sign(bytes.fromhex(digest))),
    }


def digest_of(result: Mapping[str, Any]) -> str:
    """Of everything but the seal itself."""
    content = {key: value for key, value in result.items() if key not in _SEAL}
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_result(file: Path) -> dict[str, Any]:
    """A result that was signed and not changed since. Raises InvalidArgument, which names the difference."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        result: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if (result["kind"], result["format"]) != (KIND, FORMAT):
            raise ValueError
        datetime.date.fromisoformat(result["day"])  # a file is named by it
        broken_claims(result)
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(result["public_key"], validate=True))
        signature = base64.b64decode(result["signature"], validate=True)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InvalidArgument(f"{file}: expected the JSON of `kvasir prove`, format {FORMAT}", field="file") from None
    if digest_of(result) != result["digest"]:
        raise InvalidArgument(f"{file}: it was changed after it was signed: its digest differs", field="file")
    try:
        key.verify(signature, bytes.fromhex(result["digest"]))
    except InvalidSignature:
        raise InvalidArgument(f"{file}: the signature is not that of its public key", field="file") from None
    return result


def broken_claims(result: Mapping[str, Any]) -> list[str]:
    found = [step["failed"] for step in result["steps"] if "failed" in step]
    return found + [text for text, is_met in claims(result) if not is_met]


def claims(result: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """All claims about exactness, and whether each is met."""
    values = [step["value"] for step in result["steps"] if "value" in step]
    return [(row["what"], row["is_met"]) for value in values for row in value.get("claims", ())]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
