"""`python -m kvasir.store_for_mlx_lm.server --model …`: mlx_lm.server, whose prompt caches a cache store keeps.

It is mlx-lm's program with another class of prompt caches, and takes all of its options, too. What a reply added is
stored behind it; a prompt that a stored cache begins goes on from there, after a restart and on another machine. A
store that does not answer costs time, and no request. `--keep`: how many caches of these weights stay stored."""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from mlx_lm import server as mlx_lm_server

from kvasir.clients import StoreClient
from kvasir.credentials import CredentialFileError, read_token
from kvasir.errors import InvalidArgument
from kvasir.store_for_mlx_lm.fitting import Fitting
from kvasir.store_for_mlx_lm.stored_caches import StoredPromptCaches


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir.store_for_mlx_lm.server", add_help=False)
    parser.add_argument("--store", default=f"unix:{Path.home()}/.kvasir/run/store.sock", help="unix:/path or HOST:PORT")
    parser.add_argument("--store-token-file", type=Path, help="of a credential with the role engine; none: the owner's")
    parser.add_argument("--keep", type=int, default=64, help="caches that stay stored, at least 1 (default: 64)")
    own, others = parser.parse_known_args()
    if {"-h", "--help"} & set(others):
        print(__doc__, parser.format_help(), sep="\n\n")
    if own.keep < 1:
        parser.error(f"--keep: expected at least 1, got {own.keep}; without stored caches it is mlx_lm.server itself")
    try:
        token = read_token(own.store_token_file) if own.store_token_file else None
        store = StoreClient.connect(own.store, token=token)
    except CredentialFileError as error:
        parser.error(f"--store-token-file: {error}")
    except InvalidArgument as error:
        parser.error(f"--store: {error.message}")
    server: Any = mlx_lm_server
    made: list[StoredPromptCaches] = []
    fits: list[Fitting] = []
    provider_of = server.ModelProvider

    def provider(*options: Any) -> Any:
        fits.append(Fitting(found := provider_of(*options)))
        return found

    def stored(*sizes: int) -> StoredPromptCaches:
        made.append(StoredPromptCaches(store, own.keep, lambda *cache: fits[0](*cache), *sizes))
        return made[0]

    server.ModelProvider, server.LRUPromptCache = provider, stored
    sys.argv[1:] = others
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.main()
    finally:
        for each in made:
            each.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
