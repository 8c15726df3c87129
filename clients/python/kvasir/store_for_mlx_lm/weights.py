"""The digest of the models that another server loaded, by which it knows its stored KV after a restart."""

from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3
from huggingface_hub import snapshot_download

from kvasir.formats.digest import hash_of_file

# These decide the KV of a token: weights, numbers such as the scale of angles, code of the model.
_FILES = ("*.safetensors", "config.json", "adapter_config.json", "*.py")


def weights_of(models: Iterable[str | None]) -> str:
    """Of the files of a model, its adapter and its draft model: folders, or names of models that were fetched."""
    found = blake3()
    for name in models:
        if name is not None:
            path = Path(name) if Path(name).exists() else Path(snapshot_download(name, local_files_only=True))
            for file in sorted(each for pattern in _FILES for each in path.glob(pattern)):
                with file.open("rb", buffering=0) as opened:
                    found.update(file.name.encode() + b"\0" + bytes.fromhex(hash_of_file(opened)))
        found.update(b"\0")
    return found.hexdigest()
