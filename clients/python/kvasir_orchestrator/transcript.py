"""The messages of a turn. Others' begin with their name, with later lines indented: none passes for another's."""

from collections.abc import Callable, Mapping

from kvasir_orchestrator.plan import Plan, Prompt, QuotedTurns, Turn

Message = dict[str, str]  # role and content


def quoted(name: str, words: str) -> str:
    """An agent's message, as others read it."""
    return f"{name}: " + "\n  ".join(words.splitlines())


def new_messages(turn: Turn, names: Mapping[str, str], plan: Plan, said: Mapping[int, str]) -> list[Message]:
    """What the turn adds to its agent's transcript before the reply. `said` has the words of every turn of `after`."""

    def line(index: int) -> str:
        return quoted(names[plan.turns[index].agent], said[index])

    messages = [{"role": "user", "content": line(index)} for index in turn.heard]
    filled = (_filled(prompt, line) for prompt in turn.prompts)
    return messages + [{"role": "user", "content": text} for text in filled if text]


def _filled(prompt: Prompt, line: Callable[[int], str]) -> str:
    parts = [
        "\n".join(line(index) for index in part.turns) if isinstance(part, QuotedTurns) else part for part in prompt
    ]
    return "".join(parts).strip()


def transcript(
    agent: str, until: int, personas: Mapping[str, str], names: Mapping[str, str], plan: Plan, said: Mapping[int, str]
) -> list[Message]:
    """All that an agent remembers before its turn `until`: persona, what it was shown, and its own words."""
    messages = [{"role": "system", "content": personas[agent]}] if personas[agent] else []
    for turn in plan.of_agent(agent):
        if turn.index >= until:
            break
        messages += new_messages(turn, names, plan, said)
        messages.append({"role": "assistant", "content": said[turn.index]})
    return messages
