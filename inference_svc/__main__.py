"""`python -m inference_svc serve --listen unix:/path …`: begins to load the first model, and imports the service."""

import gc
import sys
import time
from contextlib import suppress
from importlib import import_module
from threading import Thread

from kvasir.server.resting import rest

import inference_svc
from inference_svc.compiled_code import keep_compiled_code_private
from inference_svc.machine.kept_methods import keep_methods
from inference_svc.model.blas import begin_loading_mlx

_WITH_LIBRARIES = ("numpy", "tokenizers", "llguidance", "regex", "yaml")


def main() -> int:
    keep_compiled_code_private()
    methods = keep_methods()
    gc.disable()  # until `settle_garbage`: it would look through modules again and again that stay
    try:
        _import_beside_mlx()
        from inference_svc.first_model import FirstModel
    finally:  # an error is for the log
        if rest():
            inference_svc.BEGAN_S = time.monotonic()

    with FirstModel(sys.argv[1:]) as first:
        from inference_svc.serving import serve_by_arguments  # as long as weights take, which are read meanwhile

        if methods is not None:
            Thread(target=methods.keep, name="kept-methods", daemon=True).start()
        return first.leave(serve_by_arguments(sys.argv[1:], first.open_engine))


def _import_beside_mlx() -> None:
    """Modules that a model needs, too. First those whose own libraries would wait for MLX's."""
    for name in _WITH_LIBRARIES:
        with suppress(ImportError):  # a module that needs it reports that
            import_module(name)
    begin_loading_mlx()
    import inference_svc.formats.grammars  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
