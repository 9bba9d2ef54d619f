"""Token dispatchers: the ways in which tokens reach the ranks of their experts, and what is known of each."""

from __future__ import annotations

from functools import cache

import msgspec

from presage.errors import PresageError, near
from presage.files.decoding import convert_record
from presage.files.reading import shipped_toml

USUAL = "alltoall"
ANY = "any"  # the network of those that no figures are known for


class NetworkExchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a fused dispatcher reaches over a kind of network."""

    share: float  # of a rank's bandwidth
    message_us: float  # that a token takes at least, with four domains
    source: str
    growth: float = 0.0  # power of the number of domains that a message's time grows with


class Dispatcher(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token dispatcher, by its name in Megatron-Core; figures are those of its kernels where they are its own."""

    about: str
    fused: bool  # kernels of its own send a token once to each rank, and once to each domain
    sorts: bool  # tokens arrive sorted by expert
    source: str
    date: str
    aliases: tuple[str, ...] = ()
    sms: int = 0  # multiprocessors that its kernels hold
    sm_GBps: float = 0.0
    link_share: float = 1.0
    start_us: float = 0.0
    far_start_us: float = 0.0
    networks: dict[str, NetworkExchange] = {}

    def network(self, fabric: str) -> NetworkExchange:
        """Its figures over a fabric: of its kind (efa3: efa), or of any."""
        kind = fabric.rstrip("0123456789")
        return self.networks.get(kind) or self.networks[ANY]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    dispatchers: dict[str, Dispatcher]


@cache
def dispatchers() -> dict[str, Dispatcher]:
    """All there are, by name."""
    return convert_record(shipped_toml("dispatchers.toml"), _File).dispatchers


@cache
def dispatcher_name(name: str) -> str:
    """The name of a dispatcher, from it or from another that software has for it."""
    known = dispatchers()
    if name in known:
        return name
    for found, facts in known.items():
        if name in facts.aliases:
            return found
    raise PresageError(f"no token dispatcher {name!r}: choose from {', '.join(known)}{near(name, known)}")


def dispatcher(name: str) -> Dispatcher:
    """The dispatcher of a name."""
    return dispatchers()[dispatcher_name(name)]
