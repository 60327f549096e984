"""Addresses that a server may connect to for a client: public ones only.

An address that carries an IPv4 address is as public as that is."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_NAT64 = IPv6Network("64:ff9b::/96")
_TUNNELS = (
    IPv6Network("::/96"),  # IPv4-compatible, with the unspecified and the loopback address
    IPv6Network("64:ff9b:1::/48"),  # NAT64 of a local network
    IPv6Network("2001::/32"),  # Teredo
    IPv6Network("2002::/16"),  # 6to4
)
"""Networks of addresses that can carry any IPv4 address, and are not in use for servers."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name, by the system's resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(text: str) -> bool:
    """Return False for private, local, reserved and multicast addresses, and for any with a zone.

    Shared space of providers (100.64.0.0/10) is not public either."""
    if "%" in text:
        return False
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        if (inner := _carried(address)) is not None:
            return is_public(str(inner))
        if any(address in network for network in _TUNNELS):
            return False
        if address.is_site_local:
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
