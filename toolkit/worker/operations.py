"""Operations that change a running engine. Each is done on every rank, between steps.

They travel as they are from a front end to a core, and from there to its ranks."""

import msgspec

from toolkit.sequence import Adapter


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Read an adapter into the host's memory. Steps run meanwhile."""

    adapter: Adapter


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Drop an adapter from the host's memory. A core does it once no request uses it."""

    adapter: Adapter


Operation = LoadAdapter | UnloadAdapter
