"""Measures kvasir-tiny-wedlm: `python -m tools.kvasir_tiny.wedlm.evaluate MODEL`.

Recall, tool calls and the other sorts of `tools.kvasir_tiny.evaluate`, each reply decoded by windows of masks; beside
the same weights decoded token by token, and kvasir-tiny. A row for each window and threshold is the curve of quality
over tokens a pass. Times are of this reader, one row on mlx-lm's modules: not the engine's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.kvasir_tiny import evaluate  # first: it chooses the BLAS before MLX

import mlx.core as mx  # isort: skip
import numpy as np  # isort: skip
import mlx_lm.utils  # isort: skip
from mlx_lm.models.cache import QuantizedKVCache  # isort: skip

from inference_svc.engine.wedlm.reply_window import sure_places
from inference_svc.model import kvasir_tiny
from inference_svc.model.wedlm import LARGEST_WINDOW, MaskWindow, layers_config
from tools.kvasir_tiny.desk import Message
from tools.kvasir_tiny.evaluate import Reader, Report

WINDOWS = (4, 8, 17, 32)
THRESHOLDS = (0.05, 0.3, 1.0)


@dataclass
class Passes:
    """What decoding took: `made` tokens of `replies`, in `count` passes over `processed` rows."""

    replies: int = 0
    made: int = 0
    count: int = 0
    processed: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, float]:
        return {
            "passes_per_reply": self.count / max(1, self.replies),
            "tokens_per_pass": self.made / max(1, self.count),
            "p_cache": self.made / max(1, self.processed),
            "tokens_per_s": self.made / max(self.seconds, 1e-9),
        }


class WindowReader(Reader):
    """A WeDLM model with one conversation in mlx-lm's cache. `window` None: decodes token by token."""

    def __init__(self, folder: Path, bits: int | None = None, window: MaskWindow | None = None) -> None:
        super().__init__(folder, bits)
        self.window = window
        self.passes = Passes()

    def _loaded(self, folder: Path) -> tuple[Any, Any]:
        def classes(config: dict[str, Any]) -> Any:
            return mlx_lm.utils._get_classes(layers_config(config))

        model, config = mlx_lm.utils.load_model(folder, get_model_classes=classes)
        load_tokenizer: Any = mlx_lm.utils.load_tokenizer
        return model, load_tokenizer(folder, eos_token_ids=config["eos_token_id"])

    def says(self, answer: str, *messages: Message) -> bool:
        """Whether the decoded reply is exactly `answer`: windows cannot be told from the true tokens in one pass."""
        return self.ask(*messages) == answer

    def ask(self, *messages: Message, within: Any = None) -> str:
        if within is not None:
            return super().ask(*messages, within=within)
        scores = self._forward(self._suffix(messages))
        began = time.monotonic()
        reply = self._one_by_one(scores) if self.window is None else self._by_windows(self.window, scores)
        self.passes.seconds += time.monotonic() - began
        self.passes.replies += 1
        self.passes.made += len(reply)
        self._back()
        return str(self.tokenizer.decode(reply[: reply.index(self._end)] if self._end in reply else reply))

    def _one_by_one(self, scores: mx.array) -> list[int]:
        reply: list[int] = []
        while True:
            reply.append(int(np.array(scores[-1]).argmax()))
            self.passes.count += 1
            self.passes.processed += 1
            if reply[-1] == self._end or len(reply) >= self.longest_reply:
                return reply
            scores = self._forward([reply[-1]])

    def _by_windows(self, window: MaskWindow, scores: mx.array) -> list[int]:
        """`scores`: of the prompt, which gives the first token where the model gives next ones."""
        run = [int(np.array(scores[-1]).argmax())] if window.draws_next else []  # committed by the last pass
        reply = list(run)
        kept: dict[int, int] = {}  # tokens by place behind the committed ones
        largest = LARGEST_WINDOW
        while self._end not in reply and len(reply) < self.longest_reply:
            ends = [place for place, token in kept.items() if token == self._end]
            drawn = [place for place in range(min([window.size, largest, *ends])) if place not in kept]
            draws_next = window.draws_next and not kept
            places = [*sorted(kept), *drawn[draws_next:]]
            ids = [kept.get(place, window.mask_token_id) for place in places]
            logits = self.pass_of(run, ids, places)[-len(drawn) :]
            self.passes.count += 1
            self.passes.processed += len(run) + len(ids)
            kept = self._to_the_end(kept | chosen(logits, drawn, window, draws_next))
            run = []
            while len(run) in kept:
                run.append(kept.pop(len(run)))
            kept = {place - len(run): token for place, token in kept.items()}
            reply += run
            largest = window.size_behind(len(run))
        return reply[: reply.index(self._end) + 1] if self._end in reply else reply

    def _to_the_end(self, kept: dict[int, int]) -> dict[int, int]:
        """Kept tokens without those behind the first end token, where nothing is computed any more."""
        end = min((place for place, token in kept.items() if token == self._end), default=LARGEST_WINDOW)
        return {place: token for place, token in kept.items() if place <= end}

    def pass_of(self, run: Sequence[int], ids: Sequence[int], places: Sequence[int]) -> mx.array:
        """Commit `run`; and logits [rows, vocabulary] of it and of a window behind it, whose rows stand at `places`."""
        committed, first = self.cached_tokens, self.cached_tokens + len(run)
        positions = mx.array([*range(committed, first), *(first + place for place in places)])
        rows = self.model.model.embed_tokens(mx.array([[*run, *ids]]))
        for layer, cache in zip(self.model.layers, self._cache, strict=True):
            attended = _attention(layer.self_attn, layer.input_layernorm(rows), positions, cache, len(run))
            rows = rows + attended
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        rows = self.model.model.norm(rows)
        is_tied = self.model.args.tie_word_embeddings
        logits = self.model.model.embed_tokens.as_linear(rows) if is_tied else self.model.lm_head(rows)
        return mx.array(logits[0].astype(mx.float32))


def _attention(attn: Any, rows: mx.array, positions: mx.array, cache: Any, committed: int) -> mx.array:
    """Of the committed rows, which go into the cache, and of the window's behind them; causal in physical order."""
    count = rows.shape[1]
    q = attn.q_norm(attn.q_proj(rows).reshape(1, count, attn.n_heads, -1)).transpose(0, 2, 1, 3)
    k = attn.k_norm(attn.k_proj(rows).reshape(1, count, attn.n_kv_heads, -1)).transpose(0, 2, 1, 3)
    v = attn.v_proj(rows).reshape(1, count, attn.n_kv_heads, -1).transpose(0, 2, 1, 3)
    # A batch of rows has an offset for each; a row of several tokens has one for all.
    q, k = (attn.rope(each.transpose(2, 1, 0, 3), offset=positions).transpose(2, 1, 0, 3) for each in (q, k))
    if committed:
        cache.update_and_fetch(k[:, :, :committed], v[:, :, :committed])
    held = [each[:, :, : cache.offset] for each in _plain(cache)]
    keys = mx.concatenate([held[0], k[:, :, committed:]], axis=2)
    values = mx.concatenate([held[1], v[:, :, committed:]], axis=2)
    mixed = mx.fast.scaled_dot_product_attention(q, keys, values, scale=attn.scale, mask="causal")
    joined: mx.array = attn.o_proj(mixed.transpose(0, 2, 1, 3).reshape(1, count, -1))
    return joined


def _plain(cache: Any) -> tuple[mx.array, mx.array]:
    if isinstance(cache, QuantizedKVCache):
        kept: Any = (cache.keys, cache.values)
        form: Any = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = (mx.dequantize(*each, **form) for each in kept)
        return keys, values
    return cache.keys, cache.values


def chosen(logits: mx.array, places: Sequence[int], window: MaskWindow, draws_next: bool) -> dict[int, int]:
    """Tokens by place: of all that are sure enough, as the next token always is, or of the one that is least unsure."""
    logits = mx.where(mx.arange(logits.shape[1]) == window.mask_token_id, -mx.inf, logits)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    entropies = -mx.where(scores > -mx.inf, mx.exp(scores) * scores, 0).sum(axis=-1)
    tokens = logits.argmax(axis=-1)
    mx.eval(entropies, tokens)  # once for all
    found: Any = (tokens.tolist(), entropies.tolist())
    by_place, unsure = (dict(zip(places, each, strict=True)) for each in found)
    if draws_next:
        unsure[0] = -math.inf
    return {place: by_place[place] for place in sure_places(unsure, window)}


# -- the command


@dataclass
class Row:
    """One way to decode."""

    way: str
    window: int | None
    threshold: float | None
    report: Report = field(default_factory=Report)

    def measure(self, reader: WindowReader, lengths: Sequence[int], n: int) -> dict[str, Any]:
        reader.passes = Passes()
        for length in lengths:
            evaluate.examine(reader, length, n, self.report)
        shares = {name: asdict(share) for name, share in self.report.shares.items()}
        heads = {"way": self.way, "window": self.window, "threshold": self.threshold}
        return heads | reader.passes.as_json() | {"shares": shares}


def curve(given: argparse.Namespace) -> list[dict[str, Any]]:
    """kvasir-tiny, the model token by token, and each window and threshold."""
    found = [
        Row("kvasir-tiny", None, None).measure(WindowReader(kvasir_tiny.path()), given.lengths, given.n),
    ]
    reader = WindowReader(given.model, evaluate.KV_BITS[given.kv])
    found.append(Row("token by token", None, None).measure(reader, given.lengths, given.n))
    own = MaskWindow.of_config(json.loads((given.model / "config.json").read_text()))
    if own is None:
        raise SystemExit(f"{given.model}: config.json is not of a WeDLM model; expected model_type wedlm")
    for size, threshold in itertools.product(given.windows, given.thresholds):
        reader.window = replace(own, size=size, entropy_threshold=threshold)
        row = Row("windows", size, threshold).measure(reader, given.lengths, given.n)
        print(json.dumps(row | {"shares": len(row["shares"])}), file=sys.stderr, flush=True)
        found.append(row)
    return found


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each way, and the share of right replies by sort."""
    names = list(dict.fromkeys(name for row in found for name in row["shares"]))
    shown = [f"{'':16}{'window':>7}{'nats':>6}{'a pass':>8}{'p_cache':>9}{'tokens/s':>10}  " + ", ".join(names)]
    for row in found:
        shares = (row["shares"].get(name, {"right": 0, "n": 0}) for name in names)
        window, threshold = (row[name] if row[name] is not None else "" for name in ("window", "threshold"))
        shown.append(
            f"{row['way']:16}{window:>7}{threshold:>6}{row['tokens_per_pass']:8.2f}{row['p_cache']:9.2f}"
            f"{row['tokens_per_s']:10.1f}  " + ", ".join(f"{share['right']}/{share['n']}" for share in shares)
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the directory that the trainer wrote")
    parser.add_argument("--n", type=int, default=20, help="told facts at each length, as many of other sorts in all")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(evaluate.LENGTHS), help="of conversations")
    parser.add_argument("--windows", type=int, nargs="+", default=list(WINDOWS))
    parser.add_argument("--thresholds", type=float, nargs="+", default=list(THRESHOLDS), help="nats")
    parser.add_argument("--kv", choices=list(evaluate.KV_BITS), default="exact", help="mlx-lm's KVCache, or quantized")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    given = parser.parse_args()
    found = curve(given)
    print(json.dumps(found, indent=1) if given.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
