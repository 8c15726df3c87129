"""Ranks the KV policies by recall of held-out names or everyday facts: `python -m tools.kvasir_tiny.rank_policies`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from inference_svc.model.blas import load_optimized_blas

load_optimized_blas()  # before MLX

from inference_svc.kv.policy import LADDER, policy_of  # noqa: E402
from inference_svc.model import kvasir_tiny  # noqa: E402
from inference_svc.model.loading import load  # noqa: E402
from inference_svc.model.model_runner import ModelRunner  # noqa: E402
from inference_svc.model.quality import exam  # noqa: E402
from inference_svc.model.quality.conversations import Conversation, Conversations, QuestionAnswer  # noqa: E402
from inference_svc.model.quality.findings import RECALL  # noqa: E402
from inference_svc.model.quality.material import Extent  # noqa: E402
from tools.kvasir_tiny import desk, rows  # noqa: E402
from tools.kvasir_tiny.everyday import daily_life  # noqa: E402
from tools.kvasir_tiny.exams import name_exam  # noqa: E402

QUESTIONS_EACH = 20


def talks(kind: str, length: int, number: int) -> list[desk.Conversation]:
    """`number` conversations of `length` tokens: "names" or "everyday"."""
    count = rows.encoder_of(kvasir_tiny.path()).count
    if kind == "names":
        return list(name_exam.conversations(length, count))[:number]
    return [daily_life.conversation(2 * 10**6 + seed, length, count=count) for seed in range(number)]


def ranked(model: Path, asked: list[desk.Conversation], length: int) -> dict[str, tuple[int, int]]:
    """Right and asked, by policy, exact KV first."""
    loaded = load(model, "float32")
    material = Conversations(
        "",
        {
            (number, length): Conversation(
                talk.messages, [], tuple(QuestionAnswer(each.text, each.answer) for each in talk.questions), ()
            )
            for number, talk in enumerate(asked)
        },
    )
    subject = exam.Subject(ModelRunner(loaded.model), loaded.tokenizer, lambda: material, loaded.context_tokens)
    extent = Extent((length,) * len(asked), QUESTIONS_EACH, 0, canaries=1, canary_tokens=32)
    policies = {rung.value: policy_of(rung, "float32") for rung in LADDER}
    found = exam.examine(
        subject, policies, extent, clock=time.monotonic, say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    shares = {each.name: each.share(RECALL) for each in (found.exact, *found.rungs)}
    return {name: (share.right, share.n) for name, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["names", "everyday"])
    parser.add_argument("--length", type=int, choices=list(name_exam.NAMES_EACH), default=1500, help="tokens of each")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--model", type=Path, default=kvasir_tiny.path())
    given = parser.parse_args()
    found = ranked(given.model, talks(given.kind, given.length, given.conversations), given.length)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
