"""What `kvasir bench engine` measures, a case a file; each has a function `run`, which takes the lab."""
