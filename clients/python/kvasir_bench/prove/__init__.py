"""`kvasir prove`: one command that checks and measures Kvasir on this machine, and signs the results."""
