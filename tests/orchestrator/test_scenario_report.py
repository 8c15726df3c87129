"""A report is one page that loads nothing, holds no markup of anybody's words, and shows who saw what."""

import re
from html.parser import HTMLParser

from kvasir_orchestrator import Answer, Scenario, shipped_names
from kvasir_orchestrator.report.page import html_page

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\" ' &"


def answer(text: str) -> Answer:
    return Answer(text, 100, 60, 5, "hot", "extend", "", 0.05, 0.1, 1)


class Tags(HTMLParser):
    """Collects tags, and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [name for name, _ in attrs if name in ("src", "href", "srcset", "onerror", "style")]

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


def test_words_are_escaped_and_nothing_is_fetched() -> None:
    agents = "agents: {ada: {name: '<b>Ada', persona: '<script>'}}"
    scenario = Scenario.parse(f"name: evil\n{agents}\nphases: [{{name: p, agents: [ada], prompt: <i>hi}}]")
    page = parsed(html_page(scenario, "run", {0: answer(EVIL)}))
    assert page.tags.isdisjoint({"script", "img", "b>ada", "i>hi", "link", "iframe"})
    assert page.fetched == []
    assert page.text.count(EVIL) == 2, "in the conversation, and in what Ada remembers"


def test_a_page_has_every_turn_outcome_and_agent_also_of_a_run_that_was_stopped() -> None:
    for name in shipped_names():
        scenario = Scenario.shipped(name)
        answers = {turn.index: answer(f"word {turn.index};") for turn in scenario.plan.turns}
        page = parsed(html_page(scenario, "run", answers)).text
        assert all(f"word {turn.index};" in page for turn in scenario.plan.turns)
        assert all(outcome.label in page for outcome in scenario.outcomes)
        stopped = html_page(scenario, "run", {index: answers[index] for index in range(len(answers) // 2)})
        assert "not reached" in stopped
        assert f"{len(answers) // 2} of {len(answers)}" in stopped
        assert html_page(scenario, "run", {})


def test_the_table_reports_who_could_see_what() -> None:
    page = html_page(Scenario.shipped("prisoners-dilemma"), "run", {})
    [row] = re.findall(r"<tr><td>Phase 4.*?</tr>", page)
    assert re.sub(r"<[^>]+>", "|", row).split("||")[2:-1] == ["speaks; hears all"] * 3 + ["may read all"]
