"""A turn by its parts: tokenizing its text, computing its prompt, decoding its reply."""

from inference_svc.model.prompting import Prompting
from kvasir_bench.arithmetic import medians
from kvasir_bench.engine.lab import Case, Lab, Row


def run(lab: Lab) -> Case:
    """Each prompt is cold. Medians over the repeats."""
    prompting = Prompting(lab.engine.tokenizer, lab.engine.token_text)
    try:
        rows = lab.pace.rows(lab.lengths(96, 512), lambda length: [_row(lab, prompting, length)])
    finally:
        prompting.close()
    return Case("A turn by its parts", rows)


def _row(lab: Lab, prompting: Prompting, length: int) -> Row:
    reply = 12 if lab.scope.is_quick else 100
    text = lab.engine.tokenizer.decode(list(lab.prompts.tokens(length, 0)))

    def measured() -> dict[str, float]:
        began = lab.clock()
        tokens = prompting.tokenize(text).ids
        tokenize_s = lab.clock() - began
        run = lab.start(tokens, reply).ended()
        decode_s = run.token_times[-1] - run.token_times[0]
        return {"tokenize_s": tokenize_s, "prefill_s": run.first_token_s, "decode_s": decode_s}

    seconds = medians(lab.pace.counted(f"parts of a turn of {length} tokens", measured))
    return {"prompt_tokens": length, "reply_tokens": reply, **seconds, "all_s": sum(seconds.values())}
