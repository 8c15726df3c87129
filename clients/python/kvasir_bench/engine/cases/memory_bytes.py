"""Memory of a long prompt, in cells and in one chunk, with four bits and with sixteen, each in its own process."""

from kvasir_bench.arithmetic import Target
from kvasir_bench.engine.lab import Case, Lab, Row
from kvasir_bench.program import measured_by

_MOST_RATIO = 0.5
_PEER_CHUNK = 2048  # mlx-lm's own default


def run(lab: Lab) -> Case:
    """Bytes are counted by MLX and repeat exactly: one run of each is enough."""
    rows = lab.pace.rows(lab.lengths(600, 8192), lambda length: _rows(lab, length))
    targets = [
        Target(f"peak, cells / one chunk, {row['prompt_tokens']}", row["peak_ratio"], _MOST_RATIO, is_most=True)
        for row in rows[:: len(_ways(lab, 0))]
    ]
    return Case("Memory of one prompt", rows, targets)


def _ways(lab: Lab, tokens: int) -> dict[str, tuple[str, int]]:
    """KV and cells, by name; the targets are about the first."""
    cell = lab.engine.model.cell_tokens
    return {
        f"q4, cells of {cell}": ("q4", cell),
        "q4, one chunk": ("q4", tokens),
        f"16 bits, cells of {cell}": ("fp", cell),
        f"mlx-lm's own KV, chunks of {_PEER_CHUNK}": ("mlx-lm", _PEER_CHUNK),
    }


def _rows(lab: Lab, tokens: int) -> list[Row]:
    found: dict[str, dict[str, int]] = {}
    for how, (kv, cell_tokens) in _ways(lab, tokens).items():
        lab.pace.say(f"memory of {tokens} tokens, {how}")
        found[how] = _probe(lab, tokens, cell_tokens, kv)
    _, one_chunk, exact, _ = found.values()
    return [
        {
            "how": how,
            "prompt_tokens": tokens,
            "peak_bytes": each["peak_bytes"],
            "resident_bytes": _resident(each),
            "kv_bytes_per_token": _resident(each) / tokens,
            "peak_ratio": each["peak_bytes"] / one_chunk["peak_bytes"],
            "resident_ratio": _resident(each) / _resident(exact),
        }
        for how, each in found.items()
    ]


def _resident(found: dict[str, int]) -> int:
    return found["after_bytes"] - found["before_bytes"]


def _probe(lab: Lab, tokens: int, cell_tokens: int, kv: str) -> dict[str, int]:
    options = {
        "--model": lab.model,
        "--cache-dir": lab.cache_dir,
        "--tokens": tokens,
        "--cell": cell_tokens,
        "--kv": kv,
    }
    return measured_by("engine.memory_probe", "the memory probe failed", options)
