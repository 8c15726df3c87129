"""The Kvasir SDK: what a client, the engine and the store share. It needs neither MLX nor SQL."""

import os
import sys

if sys.platform == "darwin":
    # gRPC looks names up by itself, and knows neither those of mDNS, as studio.local, nor a VPN's. It reads this when
    # it is imported.
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

__version__ = "0.1.0"
