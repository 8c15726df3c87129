"""The kinds of turns that move: greedy and sampled, of messages, with tools, a reply format, log probabilities."""

import json
from typing import Any

from kvasir.inference.v1 import inference_pb2 as pb
from tokenizers import Tokenizer

from inference_svc.model import kvasir_tiny
from tools.kvasir_tiny.tools import schema

_SHOP = schema("shop_price")["function"]
TOOLS = [pb.Tool(name=_SHOP["name"], description=_SHOP["description"], parameters_json=json.dumps(_SHOP["parameters"]))]
# More than two blocks, so that some go ahead.
STORY = "Ada keeps a lamp, a rope and a map in her bag. Ben walks to the harbour and counts the ships. " * 14
_TOKENIZER = Tokenizer.from_file(str(kvasir_tiny.path() / "tokenizer.json"))
STORY_IDS = _TOKENIZER.encode(STORY, add_special_tokens=False).ids
# Without its end token kvasir-tiny speaks on. Drafts of words that another agent has said end a turn in a few
# steps, before it can leave: one case has them, a few at a time.
_END = json.loads((kvasir_tiny.path() / "config.json").read_text())["eos_token_id"]
_ENDS = dict.fromkeys([_END] if isinstance(_END, int) else _END, -100.0)
ON = {"logit_bias": _ENDS, "max_tokens": 70, "most_drafts": 0}
_SAMPLED = {**ON, "temperature": 1.0, "seed": 11}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": STORY, "sampling": ON},
    "drafts": {"prompt": STORY, "sampling": {**ON, "max_tokens": 400, "most_drafts": 2}},
    "sampled": {
        "prompt": STORY,
        "sampling": {
            **_SAMPLED,
            "logprobs": True,
            "top_logprobs": 3,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
        },
    },
    "penalized": {"prompt": STORY_IDS, "sampling": {**_SAMPLED, "repetition_penalty": 1.4, "top_p": 0.9, "top_k": 50}},
    "messages": {
        "messages": [{"role": "user", "content": STORY}, {"role": "assistant", "content": "In her bag"}],
        "continue_final_message": True,
        "sampling": _SAMPLED,
    },
    "tools": {
        "messages": [{"role": "user", "content": f"{STORY} How much does a lamp cost?"}],
        "tools": TOOLS,
        "sampling": {"max_tokens": 60, "most_drafts": 0},
    },
    "json": {
        "prompt": STORY,
        "json_schema": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9, "maxItems": 12},
        "sampling": {"temperature": 1.0, "seed": 11, "max_tokens": 120, "most_drafts": 0},
    },
    "regex": {
        "prompt": STORY,
        "regex": "([a-z]{2,5} ){24}",
        "sampling": {"temperature": 1.0, "seed": 11, "max_tokens": 160, "most_drafts": 0},
    },
}
