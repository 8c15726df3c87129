"""The asynchronous clients. The blocking ones beside this folder run their code."""
