"""A model's identity: digests of weights (with the configuration that changes them), tokenizer and template."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import Any

from blake3 import blake3
from kvasir.credentials import replace_private_text
from kvasir.errors import FailedPrecondition
from kvasir.formats.digest import hash_of_file

from inference_svc.model.weights.hashing import hashes_apart
from inference_svc.model.weights.weight_files import WeightFile, changed_files, file_identity, weight_paths

# Fields of config.json that change no KV: the model's origin, the type it was saved in, and how text is made.
_NO_PART_OF_WEIGHTS = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_CACHE_FILE = "weights-digests.json"
_LARGE_BYTES = 1 << 30  # of files that are hashed by another process, whose begin takes 0.1 s
_DIGEST = re.compile("[0-9a-f]{64}")


def weights_digest(directory: Path, cache_dir: Path, made: Mapping[str, str] | None = None) -> str:
    """BLAKE3 of the model's weights files, in name order, and of its configuration. A file's digest is kept in
    `cache_dir` under its device, inode, size and times, so that a large model is read once. The cache is only a
    shortcut: when it cannot be read or written, the files are read again. `made`: by `begin_digests`. Raises
    FailedPrecondition for a file that changes meanwhile.
    """
    known = _read_cache(cache_dir / _CACHE_FILE)
    files = [(_file_identity(path), path) for path in weight_paths(directory)]
    there = {**(made or {}), **known}
    digests = {identity: there.get(identity) or _file_digest(path, identity) for identity, path in files}
    if not digests.items() <= known.items():
        _write_cache(cache_dir / _CACHE_FILE, {**known, **digests})
    hasher = blake3(b"kvasir.weights.v1")
    for identity, _ in files:  # of which some may be one: links
        hasher.update(bytes.fromhex(digests[identity]))
    hasher.update(_computing_config(directory))
    return hasher.hexdigest()


def begin_digests(files: Sequence[WeightFile], cache_dir: Path) -> "Future[Mapping[str, str]]":
    """Begin to hash those files whose digest is not kept, by file identity, on a thread that nothing waits for."""
    found: Future[Mapping[str, str]] = Future()

    def hash_files() -> None:
        made = dict[str, str]()
        try:
            # A caller that needs the digest reads the file again; as the process ends, threads begin no work any more.
            with suppress(OSError, FailedPrecondition, RuntimeError):
                known = _read_cache(cache_dir / _CACHE_FILE)
                made.update({file.identity: known[file.identity] for file in files if file.identity in known})
                missing = [file for file in files if file.identity not in known]
                if sum(file.size_bytes for file in missing) >= _LARGE_BYTES:
                    made.update(_hashed_apart(missing))
                for file in missing:
                    if file.identity not in made:
                        made[file.identity] = _file_digest(file.path, file.identity)
        finally:
            found.set_result(made)

    Thread(target=hash_files, name="weights-digest", daemon=True).start()
    return found


def kept_digest(path: Path, cache_dir: Path) -> str | None:
    return _read_cache(cache_dir / _CACHE_FILE).get(_file_identity(path))


def forget_digest(path: Path, cache_dir: Path) -> None:
    known = _read_cache(cache_dir / _CACHE_FILE)
    _write_cache(cache_dir / _CACHE_FILE, {key: digest for key, digest in known.items() if key != _file_identity(path)})


def tokenizer_digest(directory: Path) -> str:
    path = directory / "tokenizer.json"
    return blake3(path.read_bytes()).hexdigest() if path.is_file() else ""


def template_digest(template: object) -> str:
    return blake3(template.encode()).hexdigest() if isinstance(template, str) else ""


def _computing_config(directory: Path) -> bytes:
    config = json.loads((directory / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in _NO_PART_OF_WEIGHTS}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _file_digest(path: Path, identity: str) -> str:
    """Of the file of this identity. Raises FailedPrecondition if another has its name, or if it changed meanwhile."""
    with path.open("rb", buffering=0) as file:
        digest = hash_of_file(file)
        if file_identity(os.fstat(file.fileno())) != identity:
            raise changed_files()
    return digest


def _hashed_apart(files: Sequence[WeightFile]) -> Mapping[str, str]:
    """By identity, of those files that have not changed."""
    with ExitStack() as stack:
        opened = [stack.enter_context(file.path.open("rb", buffering=0)) for file in files]
        found = zip(files, opened, hashes_apart(opened), strict=False)
        return {
            file.identity: digest
            for file, each, digest in found
            if file_identity(os.fstat(each.fileno())) == file.identity
        }


def _file_identity(path: Path) -> str:
    return file_identity(path.stat())


def _read_cache(path: Path) -> Mapping[str, str]:
    try:
        content: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str) and _DIGEST.fullmatch(value)}


def _write_cache(path: Path, digests: Mapping[str, str]) -> None:
    with suppress(OSError):  # weights are then hashed again
        replace_private_text(path, json.dumps(digests, indent=0, sort_keys=True))
