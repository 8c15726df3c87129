"""`python -m kvasir.cli.own_services.held MODULE …`: a service that ends with its input, so also where a command that
started it for itself is killed: an engine would keep its memory for good."""

import runpy
import sys

from kvasir.cli.running.program import end_with_input


def main() -> None:
    end_with_input()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
