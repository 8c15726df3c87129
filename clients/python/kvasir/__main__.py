"""`python -m kvasir`: the command line, wherever its program lies."""

from kvasir.cli.main import main

if __name__ == "__main__":
    main()
