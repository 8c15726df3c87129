"""The command line `kvasir`: tables and progress for people, --json and exit codes for scripts."""
