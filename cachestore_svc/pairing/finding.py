"""Lists the Macs that announce by mDNS that they wait to be paired. Nothing in it is trusted: the code proves."""

import asyncio
import importlib.util
import ipaddress
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvasir.address import parse_address
from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.waits import SOON_S

from cachestore_svc.pairing.codes import check_peer_address
from cachestore_svc.pairing.exchange import PEER_NAME

_TYPE = "_kvasir-pair._tcp.local."
_MAX_FOUND = 64


@dataclass(frozen=True, slots=True)
class WaitingMac:
    name: str
    address: str


def check_zeroconf() -> None:
    """Raises FailedPrecondition where the extra is not installed."""
    if importlib.util.find_spec("zeroconf") is None:
        raise FailedPrecondition("zeroconf is missing: install kvasir[lan]", reason="PEER_CONFIGURATION")


@asynccontextmanager
async def announced(name: str, address: str) -> AsyncIterator[None]:
    """Announce to the network, while inside, that a code is waited for at HOST:PORT; never the code. Raises
    FailedPrecondition for a host without an address that others can name.
    """
    from zeroconf import ServiceInfo
    from zeroconf.asyncio import AsyncZeroconf

    parsed = parse_address(address)
    found = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    addresses = _nameable({str(each[4][0]) for each in found})
    if not addresses:
        text = f"{parsed.host}: its only addresses hold on one link; announce one of IPv4, by --listen"
        raise FailedPrecondition(text, reason="PEER_CONFIGURATION")
    info = ServiceInfo(
        _TYPE, f"{name}.{_TYPE}", port=parsed.port, parsed_addresses=addresses, server=f"kvasir-{name}.local."
    )
    async with AsyncZeroconf(interfaces=addresses) as network:
        await network.async_register_service(info, allow_name_change=True)
        try:
            yield
        finally:
            await network.async_unregister_service(info)


def _nameable(addresses: Collection[str]) -> list[str]:
    """Those that another machine can dial by their text: IPv4 first, and those of one link, as of a cable, last; of
    this machine alone where there are no others. A Mac's own name has addresses of IPv6 that name an interface of its
    own, too, and may have the loopback's.
    """
    known = [ipaddress.ip_address(text) for text in addresses if "%" not in text]
    left = [each for each in known if each.version == 4 or not each.is_link_local]
    outward = [each for each in left if not each.is_loopback] or left
    return [str(each) for each in sorted(outward, key=lambda each: (each.is_link_local, each.version, int(each)))]


async def find(seconds: float, interfaces: list[str] | None = None) -> list[WaitingMac]:
    """Stores that announce within this time that they wait, by name; what no store would announce is left out."""
    from zeroconf import InterfaceChoice, ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    names: set[str] = set()

    def heard(name: str, state_change: ServiceStateChange, **_: Any) -> None:
        if state_change is ServiceStateChange.Added and len(names) < _MAX_FOUND:
            names.add(name)

    async with AsyncZeroconf(interfaces=interfaces or InterfaceChoice.All) as network:
        browser = AsyncServiceBrowser(network.zeroconf, [_TYPE], handlers=[heard])
        await asyncio.sleep(seconds)
        await browser.async_cancel()
        infos = [AsyncServiceInfo(_TYPE, name) for name in names]
        await asyncio.gather(*(info.async_request(network.zeroconf, round(1000 * SOON_S)) for info in infos))
    said = [_candidate(info.name, [*info.parsed_addresses()], info.port or 0) for info in infos]
    return sorted((each for each in said if each is not None), key=lambda each: (each.name, each.address))


def _candidate(service: str, addresses: list[str], port: int) -> WaitingMac | None:
    name = service.removesuffix(f".{_TYPE}")
    nameable = _nameable(addresses)  # mDNS gives them in no order
    if PEER_NAME.fullmatch(name) is None or not nameable:
        return None
    host = f"[{nameable[0]}]" if ":" in nameable[0] else nameable[0]
    try:
        return WaitingMac(name, check_peer_address(f"{host}:{port}", "address"))
    except KvasirError:
        return None
