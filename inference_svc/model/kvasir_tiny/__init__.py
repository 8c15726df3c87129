"""kvasir-tiny: the few-megabyte model that ships, so that everything runs on a fresh machine with no download."""

from pathlib import Path

NAME = "kvasir-tiny"


def path() -> Path:
    """The model's directory, in the form that `mlx_lm.load` takes."""
    return Path(__file__).parent / "weights"


def conversations_path() -> Path:
    """Conversations of its world that no training saw; see `quality.conversations`."""
    return Path(__file__).parent / "conversations.json"
