"""kvasir-tiny: the few-megabyte model that ships, so that everything runs on a fresh machine with no download."""

from pathlib import Path

NAME = "kvasir-tiny"


def path() -> Path:
    return Path(__file__).parent / "weights"


def conversations_path() -> Path:
    """A file of conversations of its world that no training has read; `quality.conversations` reads it."""
    return Path(__file__).parent / "conversations.json"
