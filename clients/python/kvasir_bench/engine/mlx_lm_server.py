"""`python -m kvasir_bench.engine.mlx_lm_server MODEL PORT ROWS`: mlx-lm's own server, to be measured beside Kvasir.

It is mlx_lm.server's program with its own batches and prompt caches. On a CPU it computes in float32 as Kvasir does,
which is faster there than 16 bits; as many rows decode together as there are callers at once; and all of their
connections may wait: five are its own most, and the system resets the others after a minute."""

import sys
from typing import Any

import mlx.core as mx
from kvasir.cli.running.program import end_with_input
from kvasir.errors import KvasirError
from mlx_lm import server as mlx_lm_server

from inference_svc.model.loading import device, find_model

_ROWS = 32  # its own default
_CONNECTIONS = 1024
server: Any = mlx_lm_server


class _Provider(server.ModelProvider):  # type: ignore[misc]
    """Prints once how it serves."""

    def _load(self, *paths: str | None) -> None:
        super()._load(*paths)
        kind = "its own type"
        if device() == "cpu":
            self.model.set_dtype(mx.float32)
            kind = "float32"
        options = self.cli_args
        batches = f"up to {options.decode_concurrency} rows and {options.prompt_concurrency} prompts in a batch"
        print(f"{batches if self.is_batchable else 'one request after the other'}, in {kind}", flush=True)


def main() -> int:
    end_with_input()
    name, port, rows = sys.argv[1:]
    try:
        model = find_model(name)
    except KvasirError as error:
        print(error.message, file=sys.stderr)
        return 1
    server.ModelProvider = _Provider
    server.ThreadingHTTPServer.request_queue_size = _CONNECTIONS
    sys.argv[1:] = ["--model", str(model), "--port", port, "--decode-concurrency", str(max(_ROWS, int(rows)))]
    server.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
