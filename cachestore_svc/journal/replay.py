"""The state of agents and versions that a journal's changes make, and the comparison of two such states. Pure.

A change is a list, as JSON holds it: its kind, its namespace, and the new values, by name and never by a number of some
database. So changes that were written by one database can be applied to another.

    ["agent", namespace, agent, is_pinned, retained_versions, created_unix_ms]
    ["forget", namespace, agent]
    ["label", namespace, agent, name, value or null]
    ["version", namespace, agent, kv_identity_hash, version, parent_version, manifest hash, manifest size, origin,
        origin_detail, created_unix_ms, fingerprint of what the manifest holds]
    ["drop", namespace, agent, kv_identity_hash, version]
    ["brought", namespace, blob hash, its mark: 0, 1, or 2 of a manifest whose text is its agent's own]
    ["owner", namespace, agent, state, generation, peer, move_id, since_unix_ms, was_owned, tells, had_by]
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Change = Sequence[Any]
VersionKey = tuple[str, int]  # KV identity hash, version


class Version(NamedTuple):
    """The fields of a version beside its number, in the order of its change."""

    parent_version: int
    manifest_hash: str
    manifest_size_bytes: int
    origin: int
    origin_detail: str
    created_unix_ms: int
    held: str  # fingerprint of the rows of its manifest


@dataclass(slots=True)
class Agent:
    facts: tuple[Any, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    versions: dict[VersionKey, Version] = field(default_factory=dict)


@dataclass(slots=True)
class Namespace:
    """Agents by name, the hashes of blobs that an archive or a peer brought, and the known owners of agents."""

    agents: dict[str, Agent] = field(default_factory=dict)
    brought: set[str] = field(default_factory=set)
    own_texts: set[str] = field(default_factory=set)  # of `brought`; a journal that was shortened before has none
    owners: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # by agent, also of those that are gone

    def mark_of(self, hash_: str) -> int:
        return 2 if hash_ in self.own_texts else int(hash_ in self.brought)


State = dict[str, Namespace]

_OWNER_FACTS = 8  # an older line lacks the last one, which is None then


def apply(state: State, change: Change) -> None:
    kind, name, *rest = change
    space = state.get(name)
    if space is None:
        space = state[name] = Namespace()
    if kind == "version":
        agent, kv_hash, version, *facts = rest
        _agent(space, agent).versions[kv_hash, version] = Version._make(facts)
    elif kind == "drop":
        _agent(space, rest[0]).versions.pop((rest[1], rest[2]), None)
    elif kind == "agent":
        _agent(space, rest[0]).facts = tuple(rest[1:])
    elif kind == "forget":
        space.agents.pop(rest[0], None)
    elif kind == "label":
        _set(_agent(space, rest[0]).labels, rest[1], rest[2])
    elif kind == "owner":
        agent, *facts = rest
        space.owners[agent] = (*facts, None)[:_OWNER_FACTS]
    elif kind == "brought":
        (space.brought.add if rest[1] else space.brought.discard)(rest[0])
        (space.own_texts.add if rest[1] > 1 else space.own_texts.discard)(rest[0])
    else:
        raise ValueError(f"a change of kind {kind!r} is unknown")


def changes_of(state: State) -> Iterator[Change]:
    for name, space in state.items():
        for hash_ in sorted(space.brought):
            yield ["brought", name, hash_, space.mark_of(hash_)]
        for agent_name, facts in space.owners.items():
            yield ["owner", name, agent_name, *facts]
        for agent_name, agent in space.agents.items():
            yield ["agent", name, agent_name, *agent.facts]
            for label, value in agent.labels.items():
                yield ["label", name, agent_name, label, value]
            for (kv_hash, version), facts in agent.versions.items():
                yield ["version", name, agent_name, kv_hash, version, *facts]


def differences(recorded: State, found: State) -> dict[str, dict[str, str]]:
    """Where an index differs from a journal: by namespace, agents ("": the namespace) and the difference."""
    wrong: dict[str, dict[str, str]] = {}
    for name in recorded.keys() | found.keys():
        old, new = recorded.get(name, Namespace()), found.get(name, Namespace())
        of_namespace = {
            agent: words
            for agent in old.agents.keys() | new.agents.keys()
            if (words := _agent_differs(old.agents.get(agent), new.agents.get(agent)))
        }
        for agent in old.owners.keys() | new.owners.keys():
            if _owner_differs(old.owners.get(agent), new.owners.get(agent)):
                of_namespace[agent] = ", ".join(filter(None, (of_namespace.get(agent, ""), "its owner is another")))
        if old.brought != new.brought:
            of_namespace[""] = f"the origin of {len(old.brought ^ new.brought)} blobs"
        if of_namespace:
            wrong[name] = of_namespace
    return wrong


def _owner_differs(old: tuple[Any, ...] | None, new: tuple[Any, ...] | None) -> bool:
    """The last fact counts only where both have it: a crash may have left a journal older than its index's form."""
    if old and new and None in (old[-1], new[-1]):
        return old[:-1] != new[:-1]
    return old != new


def _agent_differs(recorded: Agent | None, found: Agent | None) -> str:
    if recorded == found:
        return ""
    if recorded is None:
        return "was never made"
    if found is None:
        return f"is missing, with versions {_numbers(recorded.versions)}"
    words = []
    if missing := recorded.versions.keys() - found.versions.keys():
        words.append(f"versions {_numbers(missing)} are missing")
    if strange := found.versions.keys() - recorded.versions.keys():
        words.append(f"versions {_numbers(strange)} were never made, or are gone")
    both = recorded.versions.keys() & found.versions.keys()
    if others := [key for key in both if recorded.versions[key] != found.versions[key]]:
        words.append(f"versions {_numbers(others)} are not those that were committed")
    if recorded.labels != found.labels:
        words.append("its labels are others")
    if recorded.facts != found.facts:
        words.append("its pin, retention or time of making are others")
    return ", ".join(words)


def _numbers(versions: Iterable[VersionKey]) -> str:
    return ", ".join(str(number) for number in sorted({int(version) for _, version in versions}))


def _agent(space: Namespace, name: str) -> Agent:
    agent = space.agents.get(name)
    if agent is None:
        agent = space.agents[name] = Agent()
    return agent


def _set(labels: dict[str, str], name: str, value: str | None) -> None:
    if value is None:
        labels.pop(name, None)
    else:
        labels[name] = value
