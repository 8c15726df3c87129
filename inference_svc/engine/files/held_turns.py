"""Turns that stop between two tokens and go on in another engine: what is taken along, and how it is taken up."""

from kvasir.errors import InvalidArgument
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.layer_groups import row_groups

from inference_svc.engine.api import CarriedTurn, HeldTurn, TurnPlan
from inference_svc.engine.files.swapping import at_rest
from inference_svc.engine.sampling import Sampler
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_info import ModelInfo


def held_turn(sequence: Sequence, kv: SequenceKV, model: ModelInfo, sent_blocks: int) -> HeldTurn:
    """A turn between two tokens, whose KV is flushed and stays as it is; all files but the first `sent_blocks`."""
    assert sequence.sampler is not None
    forked = kv.fork()  # gets a rewind point, which the turn itself must not have
    try:
        at, files = at_rest(sequence, forked, model, sent_blocks)
    finally:
        forked.release()
    return HeldTurn(sequence.carried(sequence.sampler.key_words, at), files)


def sampler_of_carried(sequence: Sequence) -> Sampler:
    """The sampler where the other engine's was. Raises what the reply's format raises for a token outside of it."""
    carried = sequence.plan.carried
    assert carried is not None
    reply_ids = carried.token_ids[sequence.cells.prompt_tokens :]
    if sequence.matcher is not None:
        for token_id in reply_ids:
            sequence.matcher.accept(token_id)
    if sequence.watch is not None:
        for token_id in reply_ids:
            sequence.watch.accept(token_id)
    return Sampler(
        sequence.plan.sampling, carried.token_ids, sequence.matcher, carried.sampler_key, reply_ids, sequence.watch
    )


def check_carried(plan: TurnPlan, carried: CarriedTurn, model: ModelInfo, vocabulary_size: int) -> None:
    """Raise InvalidArgument that names the field, unless a turn of this plan may stand there. It came from outside."""
    tokens, prompt_tokens, last_block = len(carried.token_ids), len(plan.token_ids), carried.computed // BLOCK_TOKENS
    counts = (
        ("token_ids", prompt_tokens <= tokens < prompt_tokens + plan.sampling.max_tokens),
        ("token_ids", carried.token_ids[:prompt_tokens] == plan.token_ids),
        ("token_ids", carried.token_ids.largest < vocabulary_size),
        ("computed", 0 <= carried.computed < tokens),
        ("cached", 0 <= carried.cached <= prompt_tokens),  # more than computed, where that is computed again
        ("shareable", 0 <= carried.shareable <= min(carried.computed, prompt_tokens)),
        ("sampler_key", len(carried.sampler_key) == 2 and all(0 <= word < 1 << 32 for word in carried.sampler_key)),
        ("rewind_points", list(carried.rewind_points) == sorted(set(carried.rewind_points))),
        ("rewind_points", all(0 < point <= carried.computed for point in carried.rewind_points)),
        ("first_blocks", tuple(carried.first_blocks) == row_groups(model.kv_identity)),
        ("first_blocks", all(0 <= first <= last_block for first in carried.first_blocks.values())),
    )
    if wrong := next((name for name, is_right in counts if not is_right), ""):
        raise InvalidArgument.of(f"carried.{wrong}", "no turn of this prompt stands there")
