"""The time of one exchange of tokens with the ranks of their experts: a dispatch, or a combine on the way back.

NCCL's all-to-all sends a token once for each of its experts. A fused dispatcher sends it once to each rank that has
one, and over the network once to each domain; its kernels are as fast as the multiprocessors they hold, and over
networks whose sends the host posts a token takes a least time, however narrow it is. So it is ahead where tokens are
wide and chosen ranks share domains, and behind where tokens are narrow or few: its start is longer.
"""

from __future__ import annotations

from typing import NamedTuple

from presage.costs.collectives import Collectives
from presage.costs.collectives.group import RankGroup
from presage.parallel.dispatchers import Dispatcher

US, GB = 1e-6, 1e9
FOUR = 4  # domains with which a message's time was measured


class TokenExchange(NamedTuple):
    """What the busiest rank sends or receives."""

    tokens: float  # of the rank
    chosen: int  # experts of a token
    width: float  # bytes of a token
    limit: int = 0  # domains that a token's experts lie in at most (node-limited routing); 0: any


def reached(places: int, chosen: int, limit: int = 0) -> float:
    """Number of places that have one of a token's experts, of so many: chosen alike and apart from each other."""
    if limit and limit < places:
        places = limit
    return places * (1 - (1 - 1 / places) ** chosen)


def fused_seconds(
    d: Dispatcher, sent: TokenExchange, group: RankGroup, links: Collectives, launched: bool = True
) -> float:
    """An exchange by a dispatcher's own kernels; those in a CUDA graph (not `launched`) wait for no host."""
    here, domains = links.platform, group.domains
    near = min(d.sms * d.sm_GBps * GB, d.link_share * here.links[0].bandwidth)
    ranks = reached(group.per_domain, sent.chosen) if domains == 1 else _per_rank(group, sent)
    within = sent.tokens * ranks * sent.width / near
    start = d.start_us * US * launched
    if domains == 1:
        return start + within
    far, fabric = here.links[-1], d.network(here.links[-1].fabric)
    remote = reached(domains, sent.chosen, sent.limit) * (1 - 1 / domains)
    message = float(fabric.message_us * US * (domains / FOUR) ** fabric.growth)
    across = sent.tokens * remote * max(sent.width / (fabric.share * far.bandwidth), message)
    return float(d.far_start_us * US * launched + max(within, across))


def _per_rank(group: RankGroup, sent: TokenExchange) -> float:
    """Ranks of one domain that a rank there sends tokens on to: its own, and those that came for its neighbours."""
    return reached(group.ranks, sent.chosen) * (1 - 1 / group.ranks)


def nccl_seconds(op: str, nbytes: float, group: RankGroup, cuts: RankGroup, links: Collectives) -> float:
    """An exchange by NCCL's collectives: `nbytes` of a rank's tokens, once for each of their experts, and what the
    ranks that an expert is cut over (`cuts`) gather of them, or reduce on the way back."""
    alone = float(links.seconds(op, nbytes, group)) if group.ranks > 1 else 0.0
    if cuts.ranks == 1 or op != "all_to_all":
        return alone
    return alone + float(links.seconds("all_gather", nbytes * cuts.ranks, cuts))
