"""Pictures of the results of `kvasir bench engine`: a PNG for each case that has one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COLOURS = ("#b3423a", "#2f6f9f", "#3f8f4f", "#8a6d1d", "#6b4c9a")


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines of `y` over `x`, one for each value of `by` or each of several `y`; bars when `x` is no number."""

    title: str
    x: str
    y: tuple[str, ...]
    by: str = ""
    is_log: bool = False


PICTURES: Mapping[str, Picture] = {
    "decode": Picture("Tokens per second by rows in the batch", "batch", ("tokens_per_s",), by="context"),
    "peer": Picture("Engine / mlx-lm with exact KV, decoding", "context", ("ratio",), by="batch"),
    "first_token": Picture(
        "Seconds to the first token", "context_tokens", ("cold_s", "warm_s", "hot_s", "peer_cold_s"), is_log=True
    ),
    "pairs": Picture("Tokens per second of two agents", "arrival", ("tokens_per_s",), by="prompt_tokens"),
    "staggered": Picture(
        "Seconds of the staggered case", "", ("sequential_s", "staggered_s", "longest_gap_s", "allowed_gap_s")
    ),
    "gaps": Picture("Longest gap of a stream, s", "beside", ("median_gap_s", "longest_gap_s"), is_log=True),
    "cancel": Picture("Seconds until a cancelled turn is gone", "during", ("median_s", "longest_s", "step_s")),
    "decoding_bytes": Picture(
        "Bytes of agents that decode", "agents", ("kv_bytes", "scratch_bytes", "fp16_bytes"), is_log=True
    ),
    "memory": Picture("Bytes of one long prompt", "how", ("peak_bytes", "resident_bytes"), is_log=True),
    "matching": Picture("Tokens reused over a chat", "turn", ("by_characters", "by_tokens"), by="chat"),
    "shared_prefix": Picture("Tokens computed for agents with one prefix", "sharing", ("prefilled_tokens",)),
}


def plot(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write `<case>.png` for each case found. Raises ImportError without matplotlib."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = results["machine"]
    computer = f"{machine['processor']}, {machine['cores']} cores"
    computer = computer if machine["device"] == "cpu" else machine["device_name"]
    note = f"{computer}, mlx {machine['mlx']}, {results['model']['name']}"
    written: list[Path] = []
    for name, case in results["cases"].items():
        path = directory / f"{name}.png"
        draw(PICTURES[name], case["rows"], path, note)
        written.append(path)
    return written


def series(picture: Picture, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[Any], list[float]]]:
    """Points by the name of their line. A row that sums up the others (turn "all") and what was not measured are left
    out.
    """
    lines: dict[str, tuple[list[Any], list[float]]] = {}
    for row in rows:
        if row.get("turn") == "all":
            continue
        for key in (key for key in picture.y if row[key] is not None):
            named = [f"{picture.by.replace('_', ' ')} {row[picture.by]}"] if picture.by else []
            label = ", ".join([*named, key.replace("_", " ")] if len(picture.y) > 1 or not named else named)
            xs, ys = lines.setdefault(label, ([], []))
            xs.append(row[picture.x] if picture.x else "")
            ys.append(row[key])
    return lines


def draw(picture: Picture, rows: Sequence[Mapping[str, Any]], path: Path, note: str) -> None:
    """Draw one picture into a PNG; `note` stands below. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = series(picture, rows)
    is_line = all(isinstance(x, int) and not isinstance(x, bool) for xs, _ in lines.values() for x in xs)
    for index, (label, (xs, ys)) in enumerate(lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        if is_line:
            axes.plot(xs, ys, marker="o", color=colour, label=label)
        else:
            width = 0.8 / len(lines)
            places = [place + width * (index - (len(lines) - 1) / 2) for place in range(len(xs))]
            axes.bar(places, ys, width, color=colour, label=label)
            axes.set_xticks(range(len(xs)), [str(x) for x in xs], fontsize=7)
    if is_line:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for xs, _ in lines.values() for x in xs})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    if picture.is_log:
        axes.set_yscale("log")
    axes.set_xlabel(f"{picture.x.replace('_', ' ')}\n{note}", fontsize=8)
    axes.set_title(picture.title, loc="left", fontsize=11)
    axes.grid(visible=True, which="both", axis="y", alpha=0.25)
    if is_line:
        axes.legend(frameon=False, fontsize=8)
    else:
        figure.legend(frameon=False, fontsize=8, loc="outside right upper")  # bars leave no room
    figure.savefig(path)
