"""WeDLM's decoding as its authors write it down, without pages, batches or a scheduler: what the engine must equal.

One sequence; a committed token's K and V are rounded as a KV policy stores them, those of the window are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from inference_svc.kv.codec import Codec, layer_codecs
from inference_svc.kv.model_hooks.row_exact import attention_width
from inference_svc.model.wedlm import MaskWindow


@dataclass
class Reference:
    """`model`: of mlx-lm, of Qwen 3's shape. `policy`: how K and V of committed tokens are stored."""

    model: Any
    window: MaskWindow
    policy: Any
    end: int = -1  # the token that ends a reply
    keys: list[mx.array] = field(default_factory=list)  # by layer [1, kv_heads, tokens, head dim]
    values: list[mx.array] = field(default_factory=list)
    passes: int = 0
    processed: int = 0
    following: mx.array | None = None  # logits [1, vocabulary] of the last committed token

    @property
    def length(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Commit tokens: the K and V of each are what autoregressive decoding computes."""
        if token_ids:
            positions = list(range(self.length, self.length + len(token_ids)))
            self.following = self._forward(list(token_ids), positions, is_committed=True)[-1:]

    def decode_window(self, token_ids: Sequence[int]) -> mx.array:
        """Logits [window, vocabulary] of tokens that stand right behind the committed ones, in their order."""
        return self.decode_window_reordered(token_ids, range(self.length, self.length + len(token_ids)))

    def decode_window_reordered(self, token_ids: Sequence[int], positions: Sequence[int]) -> mx.array:
        """Logits [window, vocabulary] of tokens in physical order, each rotated by its logical position."""
        return self._forward(list(token_ids), list(positions), is_committed=False)

    def generate(self, prompt: Sequence[int], max_tokens: int, size: int | None = None) -> list[int]:
        """The reply, greedily. `size`: of the window, if it is not the model's."""
        self.extend(prompt)
        observed: dict[int, int] = {}
        run: list[int] = []  # committed by the last pass, K and V not computed
        if self.window.draws_next and self.following is not None:
            run = [int(mx.argmax(self.following[0, : self.window.mask_token_id]).item())]
        reply = list(run)
        largest = 32
        while len(reply) < max_tokens and self.end not in run:
            ends = [place for place, token in observed.items() if token == self.end]
            places = range(min([size or self.window.size, largest, max_tokens - len(reply), *ends]))
            draws_next = self.window.draws_next and not observed
            drawn = [place for place in places if place not in observed]
            masks = drawn[1:] if draws_next else drawn
            self.processed += len(run) + len(observed) + len(masks)
            self.passes += 1
            self.extend(run)
            order = [*sorted(observed), *masks]
            tokens = [observed.get(place, self.window.mask_token_id) for place in order]
            parts = [self.following] if draws_next and self.following is not None else []
            if order:
                parts.append(self.decode_window_reordered(tokens, [self.length + place for place in order]))
            observed |= self._chosen(drawn, mx.concatenate(parts)[len(observed) :], draws_next)
            for end in [place for place, token in observed.items() if token == self.end]:
                observed = {place: token for place, token in observed.items() if place <= end}
            run = []
            while len(run) in observed:
                run.append(observed[len(run)])
            observed = {place - len(run): token for place, token in observed.items() if place >= len(run)}
            reply += run
            if self.window.left_to_right:
                largest = len(run) + 4
        self.extend(run)
        return reply

    def _chosen(self, masks: Sequence[int], logits: mx.array, draws_next: bool) -> dict[int, int]:
        """Tokens by place: all below the threshold, or the one that is least above it. The next token is always one."""
        logits = mx.where(mx.arange(logits.shape[1]) == self.window.mask_token_id, -mx.inf, logits)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chances = mx.exp(scores)
        entropies: Any = -mx.where(chances > 0, chances * scores, 0).sum(axis=-1)
        tokens: Any = mx.argmax(logits, axis=-1).tolist()
        penalized = {
            place: entropy + self.window.position_penalty * place
            for place, entropy in zip(masks, entropies.tolist(), strict=True)
        }
        sure = [
            place for place in masks if penalized[place] < self.window.entropy_threshold or (draws_next and place == 0)
        ]
        if self.window.left_to_right:
            sure = [place for place in masks if place == 0 or {*range(1, place + 1)} <= {*sure}]
        kept = sure or [min(masks, key=lambda place: penalized[place])]
        return {place: tokens[masks.index(place)] for place in kept}

    def _forward(self, token_ids: list[int], positions: list[int], *, is_committed: bool) -> mx.array:
        rows = self.model.model.embed_tokens(mx.array([token_ids]))
        for number, layer in enumerate(self.model.layers):
            attended = self._attention(number, layer.self_attn, layer.input_layernorm(rows), positions, is_committed)
            rows = rows + attended
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        rows = self.model.model.norm(rows)
        is_tied = self.model.args.tie_word_embeddings
        logits: mx.array = self.model.model.embed_tokens.as_linear(rows) if is_tied else self.model.lm_head(rows)
        mx.eval(logits, self.keys, self.values)
        return logits[0]

    def _attention(self, number: int, attn: Any, rows: mx.array, positions: list[int], is_committed: bool) -> mx.array:
        count = rows.shape[1]
        queries = attn.q_norm(attn.q_proj(rows).reshape(1, count, attn.n_heads, -1)).transpose(0, 2, 1, 3)
        keys = attn.k_norm(attn.k_proj(rows).reshape(1, count, attn.n_kv_heads, -1)).transpose(0, 2, 1, 3)
        values = attn.v_proj(rows).reshape(1, count, attn.n_kv_heads, -1).transpose(0, 2, 1, 3)
        queries, keys = rotated(attn.rope, queries, positions), rotated(attn.rope, keys, positions)
        if is_committed:
            key_codec, value_codec = layer_codecs(self.policy, number)
            keys, values = stored(key_codec, keys), stored(value_codec, values)
        if len(self.keys) > number:
            keys = mx.concatenate([self.keys[number], keys], axis=2)
            values = mx.concatenate([self.values[number], values], axis=2)
        attended = [
            self._attended(attn, queries[:, :, row : row + 1], keys, values, keys.shape[2] - count + row)
            for row in range(count)
        ]
        if is_committed:
            self.keys[number : number + 1], self.values[number : number + 1] = [keys], [values]
        joined: mx.array = attn.o_proj(mx.concatenate(attended, axis=2).transpose(0, 2, 1, 3).reshape(1, count, -1))
        return joined

    def _attended(self, attn: Any, query: mx.array, keys: mx.array, values: mx.array, last: int) -> mx.array:
        """Of one query, over all rows up to `last`: causal in physical order. Summed as the engine sums it."""
        spare = attention_width(last + 1) - keys.shape[2]
        width = [(0, 0), (0, 0), (0, max(0, spare)), (0, 0)]
        keys, values = mx.pad(keys, width), mx.pad(values, width)
        mask = (mx.arange(keys.shape[2]) <= last)[None, None, None]
        return mx.fast.scaled_dot_product_attention(query, keys, values, scale=attn.scale, mask=mask)


def rotated(rope: Any, rows: mx.array, positions: Sequence[int]) -> mx.array:
    """Rows [1, heads, n, dim], each by its own position: as a batch of n, which has an offset for each."""
    each: mx.array = rope(rows.transpose(2, 1, 0, 3), offset=mx.array(list(positions)))
    return each.transpose(2, 1, 0, 3)


def stored(codec: Codec, rows: mx.array) -> mx.array:
    return codec.decode(codec.encode(rows), rows.dtype)
