"""The safetensors files of a model's weights: which they are, that they are whole, and where each tensor lies."""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from kvasir.errors import FailedPrecondition

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit
_TEXTS = ("config.json", "tokenizer.json")  # of which a model's identity is made too


@dataclass(frozen=True)
class TensorPlace:
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class WeightFile:
    """A file that is whole, at least when it was looked at."""

    path: Path
    identity: str
    size_bytes: int
    tensors: Mapping[str, TensorPlace]


def file_identity(status: os.stat_result) -> str:
    """Changes when a file is replaced, written to, or renamed, even if it is then put back as it was."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def weight_paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("model*.safetensors"))


def weight_files(directory: Path) -> list[WeightFile]:
    """The model's files of weights. Raises FailedPrecondition for one that is cut short, whose mapping would end us."""
    return [weight_file(path) for path in weight_paths(directory)]


def weight_file(path: Path) -> WeightFile:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(size - _LENGTH.size, _MOST_HEADER_BYTES):
                raise _Damaged(f"its header claims {length} bytes, but the file has {size}")
            header: Any = json.loads(file.read(length))
        start = _LENGTH.size + length
        return WeightFile(path, file_identity(status), size, dict(_places(header, start, size)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error, _Damaged) as error:
        raise FailedPrecondition.of(
            "model", f"{path.name} is cut short or damaged: {error}", reason="MODEL_NOT_LOADABLE"
        ) from None


def text_identities(directory: Path) -> Mapping[Path, str]:
    paths = (directory / name for name in _TEXTS)
    return {path: file_identity(path.stat()) for path in paths if path.is_file()}


def check_unchanged(directory: Path, files: Sequence[WeightFile], texts: Mapping[Path, str]) -> None:
    """Raises FailedPrecondition unless the files are those that were looked at: all that was read is of one model."""
    try:
        paths = weight_paths(directory)
        now = {**{path: file_identity(path.stat()) for path in paths}, **text_identities(directory)}
    except OSError:
        now = {}
    if now != {**{file.path: file.identity for file in files}, **texts}:
        raise changed_files()


def changed_files() -> FailedPrecondition:
    return FailedPrecondition.of(
        "model", "its files changed while they were read; load it again", reason="MODEL_NOT_LOADABLE"
    )


class _Damaged(Exception):
    """What is wrong with a file."""


def _places(header: Mapping[str, Any], start: int, size: int) -> Iterator[tuple[str, TensorPlace]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (start + index(offset) for offset in entry["data_offsets"])
        if not start <= begin <= end:
            raise _Damaged(f"tensor {name!r} ends before it begins")
        if end > size:
            raise _Damaged(f"tensor {name!r} ends at byte {end}, and the file at {size}")
        yield name, TensorPlace(begin, end - begin)
