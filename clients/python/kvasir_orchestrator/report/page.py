"""A run as one self-contained HTML page: the conversation by phase, who could see it, and what each turn reused.

Nothing is fetched and no script runs, which the page's own policy forbids too. All that agents said is escaped.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from kvasir_orchestrator.memory import Answer
from kvasir_orchestrator.model import Phase
from kvasir_orchestrator.outcomes import expectation, is_met
from kvasir_orchestrator.plan import Turn, hearers_of, readers_of
from kvasir_orchestrator.report.plots import Bar, bars, lines
from kvasir_orchestrator.scenario import Scenario

_STYLE = """
:root{color-scheme:light dark;--text:#1c2430;--soft:#5b6675;--page:#fff;--card:#f5f6f8;--edge:#dde1e7;
--old:#3b76b8;--new:#d9822b;--good:#22774a;--bad:#b3312c}
@media(prefers-color-scheme:dark){:root{--text:#e6e9ee;--soft:#9aa5b4;--page:#14181e;--card:#1d232b;--edge:#333c48;
--old:#6ba4e0;--new:#eba35c;--good:#65c492;--bad:#f0837d}}
body{margin:0 auto;max-width:52rem;padding:1.5rem;background:var(--page);color:var(--text);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{margin-bottom:0}h2{margin-top:2.5rem;border-bottom:1px solid var(--edge)}h3{margin:2rem 0 .5rem}
small,.soft{color:var(--soft)}table{border-collapse:collapse;width:100%}.wide{overflow-x:auto}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--edge);text-align:left;vertical-align:top}
.tiles{display:flex;flex-wrap:wrap;gap:.75rem;margin:1rem 0}.tiles div{flex:1 1 8rem;padding:.6rem .8rem;
background:var(--card);border-radius:.5rem}.tiles b{display:block;font-size:1.4rem}
.turn{margin:.6rem 0;padding:.6rem .8rem;background:var(--card);border-radius:.5rem}
.said,pre{white-space:pre-wrap;margin:.2rem 0;font:inherit}pre{color:var(--soft);border-left:3px solid var(--edge);
padding-left:.6rem}.met{color:var(--good)}.missed{color:var(--bad)}summary{cursor:pointer;color:var(--soft)}
figure{margin:1.5rem 0}figcaption{font-weight:600}svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}
.grid{stroke:var(--edge)}rect.old{fill:var(--old)}rect.new{fill:var(--new)}.line{fill:none;stroke-width:2.5}
.line.old{stroke:var(--old)}.line.new{stroke:var(--new)}.key i{display:inline-block;width:.8em;height:.8em;
border-radius:2px;margin:0 .3em 0 .8em}.key .old{background:var(--old)}.key .new{background:var(--new)}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(scenario: Scenario, run_id: str, answers: Mapping[int, Answer]) -> str:
    """The page of a run; of one that was stopped, with the turns that are whole."""
    done = [(turn, answers[turn.index]) for turn in scenario.plan.turns if turn.index in answers]
    said = {turn.index: answer.text for turn, answer in done}
    body = "\n".join(
        [
            f"<h1>{escape(scenario.name)}</h1>",
            f'<p class="soft">{escape(scenario.file.about.strip())}</p>',
            _tiles(scenario, done),
            *_outcomes(scenario, said),
            "<h2>What each turn reused</h2>",
            *_plots(scenario, done),
            "<h2>Who could see what</h2>",
            _visibility(scenario),
            "<h2>The conversation</h2>",
            *(_phase(scenario, phase, done, said) for phase in scenario.file.phases),
            "<h2>What each agent remembers</h2>",
            *(_memory(scenario, agent, said) for agent in scenario.agents),
            f'<p class="soft">Run {escape(run_id)}, variant {scenario.variant}.</p>',
        ]
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(scenario.name)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


_Done = Sequence[tuple[Turn, Answer]]


def _tiles(scenario: Scenario, done: _Done) -> str:
    prompts = sum(answer.prompt_tokens for _, answer in done)
    new = sum(answer.new_tokens for _, answer in done)
    firsts = sorted(answer.first_token_s for _, answer in done)
    later = [answer for turn, answer in done if scenario.plan.of_agent(turn.agent)[0] is not turn]
    extended = sum(answer.match == "extend" or answer.source == "replay" for answer in later)
    tiles = {
        "turns": f"{len(done)} of {len(scenario.plan.turns)}",
        "prompt tokens computed": f"{new:,} of {prompts:,}",
        "of later turns extend a memory": f"{extended} of {len(later)}",
        "to the first token, median": f"{firsts[len(firsts) // 2] * 1000:,.0f} ms" if firsts else "–",
    }
    shown = "".join(f"<div><b>{value}</b>{name}</div>" for name, value in tiles.items())
    return f'<div class="tiles">{shown}</div>'


def _outcomes(scenario: Scenario, said: Mapping[int, str]) -> Iterator[str]:
    if not scenario.outcomes:
        return
    rows = []
    for outcome in scenario.outcomes:
        turn = scenario.plan.find(outcome.phase, outcome.agent, outcome.round)
        assert turn is not None
        text = said.get(turn.index)
        state = "not reached" if text is None else "met" if is_met(outcome, text.strip()) else "missed"
        got = "" if text is None else f"<br>{escape(scenario.names[turn.agent])}: {escape(text.strip())}"
        rows.append(
            f'<tr><td class="{state}">{state}</td><td>{escape(outcome.label)}<br>'
            f"<small>{escape(expectation(outcome))}{got}</small></td></tr>"
        )
    yield f"<h2>Outcomes</h2><table>{''.join(rows)}</table>"


def _plots(scenario: Scenario, done: _Done) -> Iterator[str]:
    def title(turn: Turn, answer: Answer) -> str:
        return f"turn {turn.index + 1}, {scenario.names[turn.agent]}: {_reuse(answer)}"

    yield '<p class="key"><i class="old"></i>reused<i class="new"></i>computed</p>'
    tokens = [
        Bar((("old", answer.cached_tokens), ("new", answer.new_tokens)), title(turn, answer)) for turn, answer in done
    ]
    yield bars("Prompt tokens of each turn", tokens, "tokens")
    waits = [Bar((("new", answer.first_token_s * 1000),), title(turn, answer)) for turn, answer in done]
    yield bars("Time to the first token of each turn", waits, "ms")
    whole, new = _sums(answer.prompt_tokens for _, answer in done), _sums(answer.new_tokens for _, answer in done)
    yield '<p class="key"><i class="old"></i>of all prompts, reused or not<i class="new"></i>computed</p>'
    yield lines("Prompt tokens up to each turn", (("old", whole), ("new", new)), "tokens")


def _sums(values: Iterator[int]) -> list[float]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(float(total))
    return sums


def _visibility(scenario: Scenario) -> str:
    """A table of phases and agents."""
    heads = "".join(f"<th>{escape(scenario.names[agent])}</th>" for agent in scenario.agents)
    rows = []
    for phase in scenario.file.phases:
        cells = "".join(f"<td>{_sight(scenario, phase, agent)}</td>" for agent in scenario.agents)
        rows.append(f"<tr><td>{escape(phase.title)}</td>{cells}</tr>")
    return f'<div class="wide"><table><tr><th></th>{heads}</tr>{"".join(rows)}</table></div>'


def _sight(scenario: Scenario, phase: Phase, agent: str) -> str:
    """What an agent has of a phase, in words."""
    others = [speaker for speaker in phase.agents if speaker != agent]
    hears = [speaker for speaker in others if agent in hearers_of(phase, speaker)]
    reads = [speaker for speaker in others if agent in readers_of(phase, speaker) and speaker not in hears]
    parts = ["speaks"] * (agent in phase.agents)
    for verb, speakers in (("hears", hears), ("may read", reads)):
        if speakers:
            names = "all" if speakers == others else ", ".join(escape(scenario.names[each]) for each in speakers)
            parts.append(f"{verb} {names}")
    return "; ".join(parts) or '<span class="soft">nothing</span>'


def _phase(scenario: Scenario, phase: Phase, done: _Done, said: Mapping[int, str]) -> str:
    turns = [_turn(scenario, turn, answer, said) for turn, answer in done if turn.phase == phase.name]
    return f"<h3>{escape(phase.title)}</h3>{''.join(turns) or '<p class=soft>Not reached.</p>'}"


def _turn(scenario: Scenario, turn: Turn, answer: Answer, said: Mapping[int, str]) -> str:
    shown = "".join(f"<pre>{escape(message['content'])}</pre>" for message in scenario.new_messages(turn, said))
    heard = ", ".join(escape(scenario.names[agent]) for agent in scenario.agents if agent in turn.hearers)
    said_by = f'<p class="said"><b>{escape(scenario.names[turn.agent])}:</b> {escape(answer.text)}</p>'
    facts = f"turn {turn.index + 1}, round {turn.round}; {escape(_reuse(answer))}; heard by {heard or 'nobody'}"
    return f'<div class="turn">{shown}{said_by}<small>{facts}</small></div>'


def _reuse(answer: Answer) -> str:
    why = f" ({answer.reason})" if answer.reason else ""
    return (
        f"{answer.match.upper()}, {answer.source}{why}: {answer.cached_tokens:,} tokens reused, {answer.new_tokens:,} "
        f"computed, first token after {answer.first_token_s * 1000:,.0f} ms"
    )


def _memory(scenario: Scenario, agent: str, said: Mapping[int, str]) -> str:
    """An agent's transcript as far as it goes."""
    reached = next((turn.index for turn in scenario.plan.of_agent(agent) if turn.index not in said), None)
    messages = scenario.transcript(agent, said, until=reached)
    rows = "".join(
        f'<tr><td class="soft">{escape(each["role"])}</td><td class="said">{escape(each["content"])}</td></tr>'
        for each in messages
    )
    lifetime = scenario.agents[agent].lifetime
    name = escape(scenario.names[agent])
    return f"<details><summary>{name}, {lifetime}, {len(messages)} messages</summary><table>{rows}</table></details>"
