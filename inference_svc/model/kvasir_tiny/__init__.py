"""kvasir-tiny: the few-megabyte models that ship, so that everything runs on a fresh machine with no download."""

from pathlib import Path

NAME = "kvasir-tiny"
# Of the same world, with the same tokenizer; it fills a window of masks in each pass.
WEDLM_NAME = "kvasir-tiny-wedlm"


def path() -> Path:
    return Path(__file__).parent / "weights"


def shipped() -> dict[str, Path]:
    """The models that ship, by name; the first one serves where nobody names a model."""
    return {NAME: path(), WEDLM_NAME: Path(__file__).parent / "wedlm_weights"}


def name_of(directory: Path) -> str:
    """The name of a model that ships; of another directory, its own."""
    return next((name for name, path in shipped().items() if path == directory), directory.name)


def conversations_path() -> Path:
    """A file of conversations of its world that no training has read; `quality.conversations` reads it."""
    return Path(__file__).parent / "conversations.json"
