"""Configurations of well-known models as published, but for the end token, which is that of kvasir-tiny's tokenizer."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument

_END_TOKEN = 2
_CUT = re.compile(r"-(\d+)l")


# `kvasir-tiny` is the shipped model with random weights: small enough for a test.
GEOMETRIES: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def geometry(name: str, layers: int | None = None) -> dict[str, Any]:
    """The configuration of `name`, or its first `layers`, as NAME-2l. Raises InvalidArgument for others."""
    cut = _CUT.search(name)
    if cut and cut.end() == len(name) and name not in GEOMETRIES:
        name, layers = name[: cut.start()], int(cut[1]) if layers is None else layers
    if name not in GEOMETRIES:
        raise InvalidArgument.of("geometry", f"expected one of {', '.join(GEOMETRIES)}")
    config = {**GEOMETRIES[name], "eos_token_id": _END_TOKEN}
    if layers is not None:
        _cut(config, layers)
    return config


def _cut(config: dict[str, Any], layers: int) -> None:
    most = config["num_hidden_layers"]
    # mlx-lm looks for the first layer of each kind, so each kind must be there.
    least = config.get("sliding_window_pattern") or (2 if "layer_types" in config else 1)
    if not least <= layers <= most:
        raise InvalidArgument.of("layers", f"expected {least} to {most}, found {layers}")
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
