"""How a memory's rows were computed is known for as long as each turn knows it of the memory that it extends."""

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.memory.replaying import cut, replay_steps, runs_of_turn
from inference_svc.text.token_ids import TokenIds


def test_a_turn_that_reuses_rows_of_unknown_origin_knows_nothing_of_its_own() -> None:
    assert runs_of_turn(None, 10, 20, 30) is None
    assert runs_of_turn(None, 0, 20, 30) == (20, 30), "it began with nothing"
    assert runs_of_turn((), 10, 20, 20) == ()
    assert cut((3, 9, 12, 20), 15) == (3, 9, 12, 15)
    assert cut((3, 9, 12, 20), 12) == (3, 9)


TURNS = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 300), st.integers(0, 90)), min_size=1, max_size=8)


@given(TURNS)
def test_the_steps_compute_each_token_once_and_each_run_token_by_token(turns: list[tuple[float, int, int]]) -> None:
    how, runs = list[str](), ()
    for part, asked, said in turns:  # how each token was computed
        kept = int(part * len(how))
        how[kept:] = ["cell"] * asked + ["one"] * said
        found = runs_of_turn(runs, kept, kept + asked, kept + asked + said)
        assert found is not None
        runs = found
    steps = list(replay_steps(TokenIds(range(len(how))), runs))
    again = list[str]()
    for step in steps:
        del again[step.keep :]
        again += ["cell"] * (step.prompt - step.keep) + ["one"] * max(len(step.reply) - 1, 0)
        assert len(step.reply) != 1, "a run of nothing"
        assert step.keep < step.prompt or not step.reply, "a reply is drawn behind a token that is computed"
    assert again == how
    assert steps[-1].prompt == len(how)
