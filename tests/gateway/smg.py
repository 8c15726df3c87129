"""`make test-smg`: SMG, the neighbour's own gateway, before a real engine: chats, streams, and what they reuse.

SMG dials TCP and sends no token, so a port of loopback leads to the engine's Unix socket, whose owner needs none.
"""

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from inference_svc.model import kvasir_tiny
from tests.running.ports import free_port
from tests.running.system_fixtures import House, running_house

PACKAGE = "smg==1.13.0"
MODEL = "kvasir-tiny"
READY_WITHIN_S = 60.0


def main() -> int:
    """Returns 1 if a turn recomputes what the one before left. The argument: the folder to install into."""
    smg = installed(Path(sys.argv[1]).resolve())
    with (
        tempfile.TemporaryDirectory() as root,
        running_house(Path(root), kvasir_tiny.path(), engine_options=["--neighbour"]) as house,
        forwarded(house.engine.address.removeprefix("unix:")) as worker,
        gateway(smg, worker, Path(root) / "smg.log") as client,
    ):
        is_met = talk(client) and rewarmed(client, house)
    print("met" if is_met else "missed")
    return 0 if is_met else 1


def talk(client: openai.OpenAI) -> bool:
    """Three turns and a streamed one; each goes on from the turn before."""
    said: list[Any] = []
    cached_of: list[tuple[int, int]] = []
    for question in ("My name is Anna, and I live by the sea with my sister.", "What is my name?", "And where?"):
        said.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=MODEL, messages=said, max_tokens=24, temperature=0)
        said.append({"role": "assistant", "content": answer.choices[0].message.content})
        cached_of.append(cached(answer.usage))
    said.append({"role": "user", "content": "Hello?"})
    *_, last = client.chat.completions.create(
        model=MODEL, messages=said, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    cached_of.append(cached(last.usage))
    print(f"cached of prompt, turn by turn: {cached_of}; to the second question: {said[3]['content']!r}")
    return "Anna" in said[3]["content"] and all(hit > 0.7 * prompt for hit, prompt in cached_of[1:])


def rewarmed(client: openai.OpenAI, house: House) -> bool:
    """After kill -9 of store and engine SMG finds the engine again, and the conversation goes on from the store."""
    first = [{"role": "user", "content": "My dog is called Rex. He likes the rain and the old lighthouse."}]
    told: Any = client.chat.completions.create(model=MODEL, messages=first, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    house.restart()
    said: list[Any] = [
        *first,
        {"role": "assistant", "content": told.choices[0].message.content},
        {"role": "user", "content": "What is my dog called?"},
    ]
    give_up = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            answer = client.chat.completions.create(model=MODEL, messages=said, max_tokens=24, temperature=0)
            break
        except openai.APIStatusError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.5)
    hit, prompt = cached(answer.usage)
    print(f"after kill -9 of store and engine: {hit} of {prompt} cached; {answer.choices[0].message.content!r}")
    return hit > prompt // 2


def cached(usage: Any) -> tuple[int, int]:
    return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


def installed(folder: Path) -> Path:
    """SMG's program, in an environment of its own."""
    if not (folder / "bin" / "smg").exists():
        venv.create(folder, with_pip=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--only-binary", ":all:", PACKAGE], check=True, timeout=600)
    return folder / "bin" / "smg"


@contextmanager
def gateway(smg: Path, worker: int, log: Path) -> Iterator[openai.OpenAI]:
    port = free_port()
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--worker-urls", f"grpc://127.0.0.1:{worker}"], stdout=out, stderr=out)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60, max_retries=0)
        give_up = time.monotonic() + READY_WITHIN_S
        while not serves(client):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.2)
        yield client
    finally:
        process.kill()
        process.wait()


def serves(client: openai.OpenAI) -> bool:
    try:
        return any(model.id == MODEL for model in client.models.list())
    except openai.APIError:
        return False


@contextmanager
def forwarded(socket_path: str) -> Iterator[int]:
    """A port of loopback that leads to a Unix socket, for as long as this lasts."""
    loop = asyncio.new_event_loop()

    async def copied(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                to.write(data)
                await to.drain()
        except OSError:
            pass  # one side has gone, and so does the other
        finally:
            to.close()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_engine, to_engine = await asyncio.open_unix_connection(socket_path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copied(reader, to_engine), copied(from_engine, writer))

    server = loop.run_until_complete(asyncio.start_server(one, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
