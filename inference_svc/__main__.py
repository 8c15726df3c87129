"""`python -m inference_svc serve --listen unix:/path …`: begins to load the first model, and imports the service."""

import gc
import sys

from inference_svc.first_model import FirstModel


def main() -> int:
    gc.disable()  # until `settle_garbage`: it would look through modules again and again that stay
    with FirstModel(sys.argv[1:]) as first:
        from inference_svc.serving import serve_by_arguments  # as long as weights take, which are read meanwhile

        return first.leave(serve_by_arguments(sys.argv[1:], first.open_engine))


if __name__ == "__main__":
    sys.exit(main())
