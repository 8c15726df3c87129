"""Prints a conversation of kvasir-tiny's world as JSON: `python -m tools.kvasir_tiny.tell`."""

import argparse
import json
import sys
from typing import Any

from tools.kvasir_tiny.desk import Question
from tools.kvasir_tiny.world import conversation


def told(seed: int, tokens: int) -> dict[str, Any]:
    """Messages of a conversation between one person and an agent, and questions that it can and cannot answer."""
    talk = conversation(seed, tokens)
    return {
        "agent": talk.agent,
        "messages": talk.messages,
        "tools": talk.tools,
        "questions": [_question(question) for question in talk.questions],
    }


def _question(question: Question) -> dict[str, Any]:
    return {
        "sort": question.sort,
        "text": question.text,
        "answer": question.answer,
        "told_in": question.told_in,
        "value": question.fact.value if question.fact else "",
        "not_told": question.fact.not_told if question.fact else "",
    }


def main() -> None:
    """Write one conversation to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4000)
    arguments = parser.parse_args()
    json.dump(told(arguments.seed, arguments.tokens), sys.stdout, ensure_ascii=False, indent=1)


if __name__ == "__main__":
    main()
