"""Imported last by the process that forks programs. What it holds by then, no program's collections walk through; and
what each gateway would make for 50 ms, the description of its routes, is made.
"""

import functools
from importlib.metadata import version

from kvasir.server.interceptors import settle_garbage
from kvasir_gateway import openapi

openapi.document = functools.cache(openapi.document)
openapi.document(version("kvasir"))
settle_garbage()
