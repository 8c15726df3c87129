"""An agent moves to another Mac from the page, with progress, and goes on there with what it remembers."""

from pathlib import Path

import pytest

from tests.gateway.page.html_page import Browser
from tests.gateway.page.paired import PEER_NAME, front_with_peer


@pytest.mark.long(5)
def test_an_agent_moves_to_a_peer_and_its_page_tells_where_it_is(tmp_path: Path) -> None:
    with front_with_peer(tmp_path) as (front, laptop):
        ada = Browser(front.gateway.url)
        ada.sign_in(front.keys["ada"])
        for name in ("moved/by script", "moved/by form"):
            ada.send(ada.get("chat"), "say", name=name, text="My name is Anna.")
        page = ada.get("agent", id="moved/by script")
        fields = {**page.fields(page.form("move")), "peer": PEER_NAME}
        answer = ada.post("move", fields, origin=ada.url, accept="text/event-stream").text
        assert "event: moving\n" in answer
        assert answer.endswith('event: moved\ndata: {"words":"It has moved to laptop."}\n\n')
        assert "moved to laptop" in ada.get("", q="moved/by script").text
        assert "to laptop" in ada.get("agent", id="moved/by script").text
        page = ada.send(ada.get("agent", id="moved/by form"), "move", peer=PEER_NAME)
        assert "has moved" in page.all("p", role="status")[0].text
        assert {agent.agent_id for agent in laptop.list_agents().agents} == {"moved/by script", "moved/by form"}
        refused = ada.send(ada.get("chat", id="moved/by form"), "say", 400, text="Who am I?")
        assert "moved to laptop" in refused.text
