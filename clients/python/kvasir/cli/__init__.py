"""The command line `kvasir`: for people tables and progress, for scripts --json and exit codes that mean something."""
