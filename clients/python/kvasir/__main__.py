"""The program `kvasir`, and `python -m kvasir`: the command line."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C in the half second of its imports ends the process by SIGINT, without a trace."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not of a command in the background
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvasir.cli.main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
