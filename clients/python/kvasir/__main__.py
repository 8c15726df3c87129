"""The program `kvasir`, and `python -m kvasir`: the command line."""

try:
    import os
    import signal
    import sys

    from kvasir.cli.own_services.engine_ahead import begin_engine
    from kvasir.cli.own_services.installed_messages import import_messages
    from kvasir.cli.own_services.second_process import begun, is_up_alone, rest
except KeyboardInterrupt:  # from here on `main` leaves it to the system
    raise SystemExit(130) from None


def main() -> None:
    """Run the command line. Ctrl-C in the half second of its imports ends the process by SIGINT, without a trace."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not of a command in the background
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_closed_files()
    second = begun(sys.argv[1:])
    begin_engine(sys.argv[1:])
    if is_up_alone(sys.argv[1:], second):
        try:
            from kvasir.cli.own_services.up_alone import main as run
        except Exception:
            import_messages()  # some come with it: if these are the cause, the command ends here
            raise
    else:
        import_messages()
        from kvasir.cli.main import main as run

    rest()
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run(second)
    except KeyboardInterrupt:  # before the command has begun, or behind its end
        raise SystemExit(130) from None


def _open_closed_files() -> None:
    """Who starts a command may have closed its standard files: no socket and no database must get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode)  # noqa: PTH123, SIM115 - it has the lowest number that is free, and stays open
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


if __name__ == "__main__":
    main()
