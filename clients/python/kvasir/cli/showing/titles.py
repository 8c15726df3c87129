"""Titles of conversations, read from their memories when they are listed: no title is kept anywhere."""

import contextlib
import textwrap
from collections.abc import Iterable

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.errors import KvasirError
from kvasir.formats import manifest
from kvasir.formats.digest import Digest
from kvasir.names import UNNAMED_PREFIXES

LABEL = "title"
_MOST_READ = 100  # each is a memory's whole transcript
_MOST_CHARS = 40


def titles_of(client: StoreClient, agents: Iterable[pb.Agent], most_read: int = _MOST_READ) -> dict[str, str]:
    """By agent the label, else the first words of a conversation whose callers named no agent, of so many at most."""
    titles, read = {}, 0
    for agent in agents:
        if label := agent.labels.get(LABEL):
            titles[agent.agent_id] = label
        elif agent.agent_id.startswith(UNNAMED_PREFIXES) and read < most_read:
            read += 1
            titles[agent.agent_id] = _first_words(client, agent)
    return titles


def has_words(agent: pb.Agent, title: str, words: str) -> bool:
    """Whether name, title and labels have all the words, in any case of letters."""
    text = " ".join((agent.agent_id, title, *agent.labels.values())).casefold()
    return all(word in text for word in words.casefold().split())


def _first_words(client: StoreClient, agent: pb.Agent) -> str:
    """Of the first text that is not the system's; nothing where the memory cannot be read. A blob is read, because a
    version that is read counts as used."""
    with contextlib.suppress(KvasirError, LookupError):
        known = manifest.parse(client.get_blob(Digest.from_proto(agent.lines[0].manifest)))
        texts = [message.content for message in known.messages if message.role == "user"] or [known.text]
        return textwrap.shorten(manifest.without_guards(texts[0]), _MOST_CHARS, placeholder="…")
    return ""
