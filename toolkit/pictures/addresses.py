"""Addresses that a server may connect to for a client: public ones only.

An address that carries an IPv4 address is as public as that is."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_REFUSED = (
    IPv4Network("100.64.0.0/10"),  # shared space of providers
    IPv4Network("192.0.0.0/24"),  # protocols
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv6Network("2001::/32"),  # Teredo, which carries any IPv4 address
    IPv6Network("2002::/16"),  # 6to4, which does as well
    IPv6Network("3fff::/20"),  # documentation
)
"""Networks that Python, at least in some version, takes for public."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name, by the system's resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(text: str) -> bool:
    """Return False for private, local, reserved and multicast addresses, and with a zone."""
    if "%" in text:
        return False
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        if (inner := _carried(address)) is not None:
            return is_public(str(inner))
        if address not in _GLOBAL_UNICAST:
            return False
    if any(address in network for network in _REFUSED):
        return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """Resolver of names, and check of addresses before a connection. Tests have another."""

    resolve: Callable[[str, int], Awaitable[list[str]]] = resolve
    is_allowed: Callable[[str], bool] = is_public
    ssl_context: ssl.SSLContext | None = None  # the default trusts public authorities


PUBLIC = NetworkPolicy()


def _carried(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that a mapped or a NAT64 address is used for."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
