"""Rich tables of a fitted noise model."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from presage.noise.model import Belief, specified_paths
from presage.report.terminal import plain_table
from presage.text import shorten
from presage_fit.noise import KINDS, Fitted, Part

SECONDS = ("common.jitter", "stalls.seconds")
HIDDEN = ("network.moves", "network.factors.0")  # of which the file tells more than a line can
WITHOUT_UNIT = ("log_sd", "cv", "shape", "shares", "moves", "n")


def belief_table(belief: Belief, kept: frozenset[str] = frozenset(), title: str = "Noise") -> Table:
    """Every number that is not 0, what else it may be, and where it is from; those kept from the prior are dim."""
    table = plain_table(title, "number", "value", "90%", "from", left=1)
    table.columns[-1].justify = "left"
    told = specified_paths(belief)
    for path, value in belief.noise.numbers().items():
        interval = belief.intervals.get(path)
        if not _under(path, told) or _under(path, HIDDEN) or (not value and interval is None):
            continue
        middle = f"{_said(path, interval.low)} .. {_said(path, interval.high)}" if interval else ""
        prior = _under(path, kept)
        source = shorten(_source(belief, path), 52)
        table.add_row(
            _named(belief, path),
            _said(path, value),
            middle,
            f"prior: {source}" if prior else source,
            style="dim" if prior else "",
        )
    return table


def part_line(part: Part) -> str:
    """The files of one kind, and how much they hold."""
    some = ", ".join(part.files[:2]) + (f" and {len(part.files) - 2} more" if len(part.files) > 2 else "")
    return f"{some} ({KINDS[part.kind]}): {part.told}"


def prior_line(fitted: Fitted) -> str:
    """Which prior the rest is from, or that there is none."""
    if fitted.prior is None:
        return "Other parameters were not fitted; pass --gpu and --gpus to take them from presage's defaults."
    return f"not estimated, kept from the prior ({fitted.prior}): {len(fitted.kept)} numbers and distributions"


def _under(path: str, starts: Iterable[str]) -> bool:
    return any(path == s or path.startswith(f"{s}.") for s in starts)


def _named(belief: Belief, path: str) -> str:
    """Scheduled slow steps by their names, not by their numbers."""
    words = path.split(".")
    if words[0] == "scheduled":
        words[1] = f"({belief.noise.scheduled[int(words[1])].name})"
    return ".".join(words).replace("scheduled.(", "scheduled (")


def _source(belief: Belief, path: str) -> str:
    """Of a number: its own, or that of the longest start of its path."""
    words = path.split(".")
    starts = (".".join(words[:n]) for n in range(len(words), 0, -1))
    return next((belief.sources[s] for s in starts if s in belief.sources), "")


def _said(path: str, value: float) -> str:
    last = path.split(".")[-1]
    if path.startswith(SECONDS) and last not in WITHOUT_UNIT:
        return f"{value:.4g} s"
    if path.startswith("spread") or last in ("share", "sd", "drift", "drift_sd", "run_sd"):
        return f"{100 * value:.3g}%"
    return f"{value:.4g}"
