"""`python -m kvasir_bench.engine.mlx_lm_server MODEL PORT ROWS`: mlx-lm's own server, to be measured beside Kvasir.

It is mlx_lm.server's program with its own batches and prompt caches. On a CPU it computes in float32 and by the BLAS of
this machine, as Kvasir does: 16 bits are slower there, and the reference BLAS of MLX's wheel takes 25 times as long; as
many rows decode together as there are callers at once; and all of their connections may wait: five are its own most,
and the system resets the others after a minute."""

import sys
from typing import Any

from kvasir.cli.running.program import end_with_input
from kvasir.errors import KvasirError

from inference_svc.model.blas import load_optimized_blas
from inference_svc.model.loading import device, find_model

_ROWS = 32  # its own default
_CONNECTIONS = 1024


def _provider(server: Any) -> type:
    import mlx.core as mx

    class Provider(server.ModelProvider):  # type: ignore[misc]
        """Prints once how it serves."""

        def _load(self, *paths: str | None) -> None:
            super()._load(*paths)
            kind = "its own type"
            if device() == "cpu":
                self.model.set_dtype(mx.float32)
                kind = f"float32 by {load_optimized_blas() or 'the reference BLAS'}"
            options = self.cli_args
            batches = f"up to {options.decode_concurrency} rows and {options.prompt_concurrency} prompts in a batch"
            print(f"{batches if self.is_batchable else 'one request after the other'}, in {kind}", flush=True)

    return Provider


def main() -> int:
    end_with_input()
    # Behind inference_svc: it imports MLX, and then it is too late for a BLAS.
    from mlx_lm import server as mlx_lm_server

    server: Any = mlx_lm_server
    name, port, rows = sys.argv[1:]
    try:
        model = find_model(name)
    except KvasirError as error:
        print(error.message, file=sys.stderr)
        return 1
    server.ModelProvider = _provider(server)
    server.ThreadingHTTPServer.request_queue_size = _CONNECTIONS
    sys.argv[1:] = ["--model", str(model), "--port", port, "--decode-concurrency", str(max(_ROWS, int(rows)))]
    server.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
