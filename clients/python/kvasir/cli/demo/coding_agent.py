"""`kvasir demo --agent`: a coding agent with long instructions goes on where it was, after both services died."""

import json
import shutil
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from kvasir.cli.demo import run as steps
from kvasir.cli.demo.mac import Mac
from kvasir.cli.demo.run import Claims
from kvasir.cli.talking.turn import TurnResult
from kvasir.clients import InferenceClient, message
from kvasir.inference.v1 import inference_pb2 as pb

AGENT = "coder"
INSTRUCTION_TOKENS, QUICK_TOKENS = 30_000, 4_000
_CONTEXT_TOKENS = 65_536
_RULES = ("Read a file before you change it.", "Run the tests after each change.", "Say what you did, in one line.")


def play(say: Callable[[str], None], claims: Claims, make: Callable[..., Mac], root: Path, tokens: int) -> None:
    """Raises what the services refuse."""
    mac = make("first", model=str(_long_model(root / "kvasir-tiny")))
    steps.start(mac)
    instructions = _instructions(mac, tokens)
    say("The agent reads its instructions once; on two cores 30,000 tokens take minutes")
    asked = [message("system", instructions), message("user", "The build fails. Look at it.")]
    first = mac.say(AGENT, asked, is_new=True, on_progress=_shown(say))
    say(f"  first token after {first.first_token_s:.1f} s")
    second = mac.say(AGENT, [message("user", "Now run the tests.")])
    _say_reuse(say, second)
    say("kill -9 for both services, in the middle of a turn")
    error = steps.die_in_a_turn(mac, AGENT, [message("user", "Mend the test that fails.")])
    claims.check(
        "the broken turn's error names the version that is kept",
        error is not None and error.metadata.get("remembered_version") == str(second.stored.version),
    )
    say(f"Both run again after {steps.start(mac):.1f} s")
    after = mac.say(AGENT, [message("user", "Mend the test that fails.")])
    _say_reuse(say, after)
    known = second.prompt_tokens + second.completion_tokens
    claims.check(
        "the agent goes on from the store: nothing that it knew was computed again",
        after.source == "warm" and after.cached_tokens >= known - 1,
        f"{after.cached_tokens:,} of {after.prompt_tokens:,} prompt tokens",
    )
    claims.check(
        "its first token comes in a tenth of the time",
        after.first_token_s < first.first_token_s / 10,
        f"{after.first_token_s:.2f} s instead of {first.first_token_s:.1f} s",
    )


def _long_model(folder: Path) -> Path:
    with as_file(files("inference_svc.model.kvasir_tiny") / "weights") as weights:
        shutil.copytree(weights, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": _CONTEXT_TOKENS}))
    return folder


def _instructions(mac: Mac, tokens: int) -> str:
    def text(rules: int) -> str:
        return "\n".join(f"{number}. {_RULES[number % len(_RULES)]}" for number in range(rules))

    sample = 300
    with InferenceClient.connect(mac.engine.address) as engine:
        each = engine.count_tokens(messages=[message("system", text(sample))]) / sample
    return text(int(tokens / each))


def _shown(say: Callable[[str], None]) -> Callable[[pb.PrefillProgress], None]:
    """Tells each tenth of a prompt."""
    told = 0

    def on_progress(progress: pb.PrefillProgress) -> None:
        nonlocal told
        tenth = 10 * progress.tokens_done // max(progress.tokens_total, 1)
        if tenth > told:
            told = tenth
            say(f"  {progress.tokens_done:,} of {progress.tokens_total:,} tokens")

    return on_progress


def _say_reuse(say: Callable[[str], None], turn: TurnResult) -> None:
    reused = f"{turn.cached_tokens:,} of {turn.prompt_tokens:,} tokens reused"
    say(f"  {reused}, first token after {turn.first_token_s:.2f} s")
