"""A process of vLLM, which tests run: it reads settings and then lists of prompts, a line of JSON each, and writes
the replies to each list, and how often a request lost its blocks. Before an empty list it resets all caches.

Its Python has vLLM, and of Kvasir the SDK alone."""

import json
import sys

from vllm import LLM, SamplingParams


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
        made = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=settings["most"], ignore_eos=True),
            use_tqdm=False,
        )
        found = [[list(each.outputs[0].token_ids), each.num_cached_tokens] for each in made]
        print(f"PREEMPTED {sum(each.value for each in llm.get_metrics() if each.name == 'vllm:num_preemptions')}")
        print("MADE " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
