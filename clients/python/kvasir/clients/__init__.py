"""The clients of both services, blocking and asynchronous. Import them from here: the modules below may move."""

from kvasir.clients.aio.inference_client import AioInferenceClient
from kvasir.clients.aio.store_client import AioStoreClient, Lineage
from kvasir.clients.blocking_clients import InferenceClient, StoreClient
from kvasir.clients.channel import PinnedTls, Tls
from kvasir.clients.generate_options import GenerateOptions
from kvasir.clients.inference_client_turns import Choice, Reply
from kvasir.clients.messages import enum_word, message, text_of

__all__ = [
    "AioInferenceClient",
    "AioStoreClient",
    "Choice",
    "GenerateOptions",
    "InferenceClient",
    "Lineage",
    "PinnedTls",
    "Reply",
    "StoreClient",
    "Tls",
    "enum_word",
    "message",
    "text_of",
]
