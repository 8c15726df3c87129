"""Whether the installed libraries can read this version's messages. This file imports nothing that takes long."""

import importlib
import sys


def import_messages() -> None:
    """After `git pull` the messages may be newer than the libraries that read them: then the command ends."""
    for messages in ("kvasir.cachestore.v1.cachestore_pb2_grpc", "kvasir.inference.v1.inference_pb2_grpc"):
        try:
            importlib.import_module(messages)
        except Exception as error:  # noqa: BLE001 - protobuf, gRPC and Python have an error of their own each
            print(
                "kvasir: an installed package is too old for this version of Kvasir: run `make install` in a checkout, "
                f"or install kvasir again ({str(error).split('. ')[0]})",
                file=sys.stderr,
            )
            sys.exit(4)
