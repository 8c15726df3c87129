"""An inference service whose model is played, for `kvasir bench memory-path --shape` and the campaign of sizes.

`python -m inference_svc.bench.played_engine --shape llama-3.1-8b serve --listen …` takes the service's options behind
its own. All of it is the real service but the model: replies mean nothing, and pages have the shape's size and depend
on every token before them. No option of the service itself serves such a model.
"""

import sys
from collections.abc import Sequence
from functools import partial

from inference_svc.__main__ import serve_as_told
from inference_svc.engine.engine import Engine
from inference_svc.model.played.played_model import NAME_PREFIX, open_played

_OPTION = "--shape"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != [_OPTION] or len(given) < 2:
        print(f"played_engine: expected {_OPTION} NAME, then the service's options", file=sys.stderr)
        return 2
    shape = given[1]
    model = ["--model", f"{NAME_PREFIX}{shape}={shape}"]
    return serve_as_told([*given[2:], *model], partial(Engine.open, opener=open_played))


if __name__ == "__main__":
    sys.exit(main())
