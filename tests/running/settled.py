"""Imported last by the process that forks programs: what it holds by then, no program's collections walk through."""

from kvasir.server.interceptors import settle_garbage

settle_garbage()
