"""The command line `kvasir`: tables and progress for people, --json and exit codes for scripts."""

import importlib
import sys

# After `git pull` the messages may be newer than the libraries that read them.
for _messages in ("kvasir.cachestore.v1.cachestore_pb2_grpc", "kvasir.inference.v1.inference_pb2_grpc"):
    try:
        importlib.import_module(_messages)
    except Exception as error:  # noqa: BLE001 - protobuf, gRPC and Python have an error of their own each
        print(
            "kvasir: an installed package is too old for this version of Kvasir: run `make install` in a checkout, or "
            f"install kvasir again ({str(error).split('. ')[0]})",
            file=sys.stderr,
        )
        sys.exit(4)
