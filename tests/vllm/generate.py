"""A process of vLLM, which tests run: it reads settings and then lists of prompts, a line of JSON each, and writes
the replies to each list, which was whole, and how often a request lost its blocks. Before an empty list it resets all
caches.

Its Python has vLLM, and of Kvasir the SDK alone."""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams


def made_by(llm: Any, prompts: list[list[int]], most: int) -> list[Any]:
    """Replies to all at once, in their order."""
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    ended = {}
    while llm.llm_engine.has_unfinished_requests():
        for each in llm.llm_engine.step():
            if each.finished:
                ended[int(each.request_id)] = [list(each.outputs[0].token_ids), each.num_cached_tokens]
                print(f"FINISHED {each.request_id}", flush=True)
    return [ended[number] for number in range(len(prompts))]


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    llm = LLM(
        settings["model"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        kv_transfer_config=settings["connector"],
        disable_log_stats=False,
        **({"max_model_len": 4096} | settings["others"]),
    )
    for line in sys.stdin:
        if not (prompts := json.loads(line)):
            llm.reset_prefix_cache(reset_connector=True)
        found = made_by(llm, prompts, settings["most"])
        print(f"PREEMPTED {sum(each.value for each in llm.get_metrics() if each.name == 'vllm:num_preemptions')}")
        print("MADE " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
