"""Writes the weighted mean of files of weights: `python -m tools.kvasir_tiny.wedlm.mean OUT FILE SHARE FILE SHARE...`.

Between a model and one that was trained on from it lie models that forgot less and learned less."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from safetensors import numpy as tensor_files


def write(out: Path, parts: dict[Path, float]) -> None:
    """In the type of the first file; the shares are divided by their sum."""
    loaded = [tensor_files.load_file(file) for file in parts]
    shares = [share / sum(parts.values()) for share in parts.values()]
    mean = {
        name: sum(share * each[name].astype(np.float32) for share, each in zip(shares, loaded, strict=True)).astype(
            array.dtype
        )
        for name, array in loaded[0].items()
    }
    tensor_files.save_file(mean, out, metadata={"format": "mlx"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="+", metavar="FILE SHARE")
    given = parser.parse_args()
    write(
        given.out, {Path(file): float(share) for file, share in zip(given.parts[::2], given.parts[1::2], strict=True)}
    )


if __name__ == "__main__":
    main()
