"""A language's program as a process: it is told one call at a time, and answers with a value or a refusal."""

import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Longer than any call of the steps takes on a busy machine; the program is ended then.
ANSWER_WITHIN_S = 120.0


class Refused(Exception):
    """The client raised its typed error; `code`, `reason`, `field`, `retry_after_s` and `metadata` as it told them."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(json.dumps(error, ensure_ascii=False))
        self.code = error["code"]
        self.reason = error["reason"]
        self.field = error["field"]
        self.retry_after_s = error["retry_after_s"]
        self.metadata = error["metadata"]


class Testee:
    """The program. Use it with `with`: it ends when its input does, and is killed if it does not."""

    def __init__(self, command: Sequence[str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._calls = 0
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, name: str, **arguments: object) -> Any:
        """The value that the program answers with. Raises Refused for its client's typed error."""
        self._calls += 1
        line = json.dumps({"id": self._calls, "call": name, **arguments}, ensure_ascii=False)
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._answer(name)
        assert answer.get("id") == self._calls, f"{name}: expected an answer to call {self._calls}, got {answer}"
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["ok"]

    def end(self, within_s: float = 10.0) -> int:
        """Close its input; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(within_s)

    def __enter__(self) -> "Testee":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self, name: str) -> Any:
        try:
            line = self._answers.get(timeout=ANSWER_WITHIN_S)
        except queue.Empty:
            raise AssertionError(f"{name}: no answer within {ANSWER_WITHIN_S:.0f} s") from None
        assert line, f"{name}: the program ended with {self._process.wait()}"
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")
