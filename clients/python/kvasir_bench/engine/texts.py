"""Texts that the engine remembers, each computed once, however many of its lengths are measured."""

from kvasir_bench.engine.lab import Lab, LabMemory


class Texts:
    """Memories of the lab's texts by number: one of more tokens goes on from the longest of its text so far."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._longest: dict[int, LabMemory] = {}
        identity = lab.engine.model.kv_identity
        # A state is not cut, and a window has left the rows before it.
        self._is_kept = not lab.engine.model.state_bytes and not any(layer.window for layer in identity.layers)

    def remember(self, tokens: int, number: int) -> LabMemory:
        """A new agent with so many tokens of this text, and the next one, in memory."""
        agents, longest = self._lab.agents, self._longest.get(number)
        memory = agents.remember(self._lab.prompts.tokens(tokens, number), longest)
        if self._is_kept and (longest is None or len(longest.tokens) < len(memory.tokens)):
            self._longest[number] = agents.fork(memory)
            agents.forget([longest] if longest else [])
        return memory

    def forget(self) -> None:
        """Agents keep their memories."""
        self._lab.agents.forget(self._longest.values())
        self._longest.clear()
