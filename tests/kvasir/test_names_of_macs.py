"""A Mac's name in its network, as studio.local, is looked up by the system: gRPC's own resolver knows no mDNS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference.kv.attention.emulators import needs_compiler

STARTED = """
import sys
from importlib.abc import MetaPathFinder

here = sys.platform

class Grpc(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        sys.platform = sys.argv[1] if name == "kvasir" else here  # while that module runs
        if name == "grpc":
            import os
            print(os.environ.get("GRPC_DNS_RESOLVER"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Grpc())
__import__(sys.argv[2])
"""
# A system that knows the name.
SYSTEM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
int getaddrinfo(const char* name, const char* service, const struct addrinfo* hints, struct addrinfo** found) {
  int (*next)(const char*, const char*, const struct addrinfo*, struct addrinfo**) = dlsym(RTLD_NEXT, "getaddrinfo");
  return next(name && !strcmp(name, "studio.local") ? "127.0.0.1" : name, service, hints, found);
}
"""
CALL = """
import sys
sys.platform = "darwin"
import kvasir
sys.platform = "linux"
import grpc
from concurrent.futures import ThreadPoolExecutor
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("studio.local:0")
server.start()
try:
    grpc.insecure_channel(f"studio.local:{port}").unary_unary("/a/b")(b"", timeout=10)
except grpc.RpcError as error:
    print(error.code().name)
"""


def ran(code: str, *words: str, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if name != "GRPC_DNS_RESOLVER"} | environment
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=own, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "kvasir.clients",
        "kvasir.cli.main",
        "cachestore_svc.__main__",
        "inference_svc.edge.agent_service",
        "kvasir_gateway.__main__",
    ],
)
def test_it_is_chosen_before_grpc_is_imported(module: str) -> None:
    assert ran(STARTED, "darwin", module) == "native"


def test_elsewhere_and_where_it_was_chosen_it_stays() -> None:
    assert ran(STARTED, "linux", "kvasir.clients") == "None"
    assert ran(STARTED, "darwin", "kvasir.clients", GRPC_DNS_RESOLVER="ares") == "ares"


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="its loader takes the place of functions")
def test_a_name_that_the_system_alone_knows_is_listened_at_and_called(tmp_path: Path) -> None:
    source, library = tmp_path / "system.c", tmp_path / "system.so"
    source.write_text(SYSTEM)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    assert ran(CALL, LD_PRELOAD=str(library)) == "UNIMPLEMENTED"
