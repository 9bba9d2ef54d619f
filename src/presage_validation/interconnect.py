"""What a text says of the links between GPUs: "NVLink3+8xHDR200 IB", "1600G RoCE/node", "NVL72 + IB", "n/a".

Cards are counted where it says how many, else a rate is the node's where it says so or is more than one card has, and a
GPU's where it says so or is what is usual for the GPU. Storage, PCIe and NVLink's own rates are left aside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Interconnect", "read_interconnect"]

# The first word that fits tells the kind of network.
KINDS = (
    (r"omni-?path|\bopa", "omnipath"),
    (r"\befa|elastic fabric|\bp4d|\bp5", "efa"),
    (r"slingshot|cassini", "slingshot"),
    (r"roce|rdma|spectrum", "roce"),
    (r"infini-?band|\bib\b|[xnhef]dr(?![a-z])", "infiniband"),
    (r"tcp|ethernet|\bgbe\b|gige", "ethernet"),
)
# Gb/s of a card by its name, where no number is given.
CARDS = (
    (r"xdr|connect-?x-?8|\bcx-?8", 800.0),
    (r"ndr|connect-?x-?7|\bcx-?7|bluefield-?3|\bbf-?3", 400.0),
    (r"hdr|connect-?x-?6|\bcx-?6|slingshot", 200.0),
    (r"edr|connect-?x-?5|\bcx-?5|omni-?path|\bopa", 100.0),
    (r"fdr", 56.0),
)
INSTANCES = {"p4de": 400.0, "p4d": 400.0, "p5en": 3200.0, "p5": 3200.0}  # Gb/s a node of Amazon's
RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(TB|GB|Tb|Gb|T|G|g)(?:it)?(?:/s|ps|E)?(?![a-z])")
NAMED_RATE = re.compile(r"(?:[xnhef]dr|omni-?path|opa)[\s-]*(\d{2,4})", re.IGNORECASE)
COUNT = re.compile(r"(?<![\w.])(\d{1,3})\s*[x×*](?![a-z]{0,2}\d*\s*pcie)\s*", re.IGNORECASE)
OWN_LINKS = re.compile(
    r"(?:nvlink|nvswitch|xgmi|infinity fabric|pcie|c2c)[-\s]?(?:gen)?\s?\d*(?:\.0)?(?:\s*x\s*\d+)?[\s(:,]*"
    r"(?:[\d.]+\s*[GT]B(?:/s|ps)\)?)?",
    re.IGNORECASE,
)
LARGEST_CARD = 800.0
SCALE = {"TB": 8000.0, "GB": 8.0, "Tb": 1000.0, "T": 1000.0, "Gb": 1.0, "G": 1.0, "g": 1.0}


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What was said; None where nothing was."""

    node_Gbps: float | None = None
    fabric: str | None = None
    cards: int | None = None  # in a node
    domain: int | None = None  # GPUs that share NVLink
    pcie_only: bool = False  # PCIe is named, and no link between GPUs


def read_interconnect(text: str, per_node: int, usual_Gbps: float) -> Interconnect:
    """Read a text about nodes of so many GPUs, whose usual network is so many Gb/s a GPU."""
    network = _network(text)
    lower = network.lower()
    fabric = next((kind for pattern, kind in KINDS if re.search(pattern, lower)), None)
    cards, rate = _cards(network, per_node, usual_Gbps)
    if fabric == "ethernet" and rate is None:  # no rate: of the host's own cards nothing is said, GPUs have theirs
        fabric = "roce"
    domain = re.search(r"nvl[-\s]?(\d{1,3})(?!\d)", text.lower())
    pcie = "pcie" in text.lower() and not re.search(r"nvl|xgmi|infinity", text.lower())
    return Interconnect(rate, fabric, cards, int(domain[1]) if domain else None, pcie)


def _network(text: str) -> str:
    """The part of a text that is of the network for training."""
    compute = re.search(r"compute\s*:\s*(.*)", text, re.IGNORECASE)
    kept = compute[1] if compute else re.sub(r"storage\s*:[^;]*", "", text, flags=re.IGNORECASE)
    parts = [p for p in re.split(r"[;+|]", kept) if not re.search(r"bandwidth for gpu|pcie-nic", p, re.IGNORECASE)]
    return OWN_LINKS.sub(" ", " + ".join(parts))


def _cards(text: str, per_node: int, usual: float) -> tuple[int | None, float | None]:
    """Cards of a node where they are counted, and Gb/s of a node."""
    for part in text.split(" + "):
        count, rate = COUNT.search(part), _rate(part)
        if count and rate and int(count[1]):
            return int(count[1]), int(count[1]) * rate
        if rate:
            return None, _of_node(part, rate, per_node, usual)
    return None, None


def _rate(part: str) -> float | None:
    """Gb/s that a part of the text names: with a unit, after the name of a network, or by the name of a card."""
    found = RATE.search(part)
    if found:
        return float(found[1]) * SCALE[found[2]]
    named = NAMED_RATE.search(part)
    if named:
        return float(named[1])
    lower = part.lower()
    instance = next((rate for name, rate in INSTANCES.items() if re.search(rf"\b{name}\b", lower)), None)
    return instance or next((rate for pattern, rate in CARDS if re.search(pattern, lower)), None)


def _of_node(part: str, rate: float, per_node: int, usual: float) -> float:
    """A rate that stands alone: a GPU's, a node's, or a card's, of which there is one or one a GPU."""
    lower = part.lower()
    if re.search(r"(/|per|a|each)\s*-?\s*(gpu|accelerator|card|nic|port)", lower):
        return rate * per_node
    if re.search(r"(/|per|a|each)\s*-?\s*(node|host|server|machine|instance)", lower) or rate > LARGEST_CARD:
        return rate
    return rate * per_node if rate == usual else rate
