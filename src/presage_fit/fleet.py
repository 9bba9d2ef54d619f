"""What other fleets say of slow GPUs: how many there were in each, and so how many another may have.

Shares differ from fleet to fleet as a Beta distribution says, whose two numbers are not known but weighed by how well
they explain the counts: few fleets make a wide prior. A fleet that is to be judged is left out, and all of its site
with it, because several tables are of the same machines.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage.noise.distribution import Distribution, LogNormal, Mixture
from presage.noise.model import Belief, CredibleInterval, NoiseModel, SlowGpus, WorkSpread
from presage_fit.fleet_files import MeasuredFleet
from presage_fit.random_effects import EffectEstimate, estimate_of

Floats = NDArray[np.float64]
SLOW = 4.0  # standard deviations of the body above the median, from where a GPU of a known fleet is counted as slow
AVERAGES = np.geomspace(0.001, 0.2, 30)  # of a fleet's share, tried
STRENGTHS = np.geomspace(0.5, 200, 25)  # GPUs that an average is worth


@dataclass(frozen=True)
class KnownFleet:
    """A fleet that was measured."""

    name: str
    site: str
    gpu: str
    work: str
    gpus: int
    slow: int
    body_sd: float
    largest: float  # factor of its slowest GPU


@cache
def known_fleets() -> tuple[KnownFleet, ...]:
    """Those that come with presage."""
    table = tomllib.loads(files("presage").joinpath("data/noise/fleets.toml").read_text(encoding="utf-8"))
    return tuple(KnownFleet(**f) for f in table["fleets"])


def without(name: str, fleets: Sequence[KnownFleet] | None = None) -> tuple[KnownFleet, ...]:
    """The fleets of other sites than that of a fleet; all, where nothing is known of it."""
    fleets = known_fleets() if fleets is None else tuple(fleets)
    sites = {f.site for f in fleets if f.name == name or f.site in name.lower()}
    return tuple(f for f in fleets if f.site not in sites)


def share_weights(shares: Floats, fleets: Sequence[KnownFleet]) -> Floats:
    """How likely each of these shares of slow GPUs is in another fleet; together 1."""
    from scipy.special import betainc, betaln

    average, strength = (m.ravel() for m in np.meshgrid(AVERAGES, STRENGTHS))
    a, b = average * strength, (1 - average) * strength
    slow, rest = np.array([f.slow for f in fleets]), np.array([f.gpus - f.slow for f in fleets])
    fit = np.sum(betaln(slow[:, None] + a, rest[:, None] + b) - betaln(a, b), axis=0)
    weight = np.exp(fit - fit.max())
    ends = np.concatenate([[0.0], np.sqrt(shares[1:] * shares[:-1]), [1.0]])
    each = np.diff(betainc(a[:, None], b[:, None], ends), axis=1)
    return np.asarray(weight @ each / weight.sum())


# ---- The distribution of GPUs' factors: a Normal body of the logarithm and a few slow ones, as far as a sample tell

MAD = 0.6744897501960817  # median absolute deviation of a standard Normal
SHARES = np.geomspace(2e-4, 0.4, 28)
LEAST_SIZE, LARGEST_SIZE, SIZES = 3.0, 60.0, 160  # in standard deviations of the body, and how many are tried
WIDTHS = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5])
BODIES = np.linspace(-2.8, 2.8, 7)  # log of the body's sd about its first estimate, over the root of the GPUs
KEPT = 400  # combinations, drawn evenly by weight
POINTS = 150  # GPUs above the median that are taken one by one; more are put in bins
GOLDEN = 0.6180339887498949
FLAT = -600.0  # log of the density of the body, at least


@dataclass(frozen=True, eq=False)
class Tail:
    """Combinations that explain a sample, each as likely as the next; logarithms."""

    middle: float
    sd: Floats
    share: Floats
    size: Floats  # of slow GPUs, in standard deviations of the body
    width: Floats  # of sizes, as a share of them

    def largest(self, n: int) -> EffectEstimate:
        """The factor that the slowest of n GPUs has on average."""
        steps = self._steps()
        below = self._cdf(steps) ** n
        factor = np.exp(self.middle + self.sd[:, None] * steps)
        return estimate_of(factor[:, 0] + np.sum((1 - (below[:, 1:] + below[:, :-1]) / 2) * np.diff(factor), axis=1))

    def quantile(self, p: float) -> EffectEstimate:
        """The factor that a share p of GPUs does not exceed, p from a half on."""
        steps = self._steps()
        at = np.array([np.interp(p, row, steps) for row in self._cdf(steps)])
        return estimate_of(np.exp(self.middle + self.sd * at))

    def largest_quantile(self, n: int, p: float) -> EffectEstimate:
        """What the slowest of n GPUs does not exceed with probability p."""
        return self.quantile(p ** (1 / n))

    def _steps(self) -> Floats:
        """Where distributions are evaluated, in standard deviations of the body."""
        top = max(160.0, 2.7 * float(self.size.max()))
        return np.concatenate([np.linspace(-1, 6, 120), np.geomspace(6.05, top, 260)])

    def _cdf(self, steps: Floats) -> Floats:
        from scipy.special import ndtr

        share, size = self.share[:, None], self.size[:, None]
        slow = ndtr((steps - size) / (self.width[:, None] * size))
        return np.asarray((1 - share) * ndtr(steps) + share * slow)

    def numbers(self) -> dict[str, EffectEstimate]:
        """The body's sd, the share of slow GPUs, their median factor, and the sd of its logarithm."""
        return {
            "sd": estimate_of(self.sd),
            "share": estimate_of(self.share),
            "factor": estimate_of(np.exp(self.sd * self.size)),
            "width": estimate_of(self.sd * self.size * self.width),
        }


def body_sd(logs: Floats) -> float:
    """Standard deviation of a sample's body: half of it is within 0.67 of this; of more where half are the same."""
    low, high = np.quantile(logs, (0.16, 0.84))
    tried = (np.median(np.abs(logs - np.median(logs))) / MAD, (high - low) / 2, np.std(logs))
    return float(next((x for x in tried if x > 1e-6), 1e-6))


def fit_tail(logs: Floats, fleets: Sequence[KnownFleet]) -> Tail:
    """From the logarithms of GPUs' factors, and other fleets."""
    middle, first = float(np.median(logs)), body_sd(logs)
    over, counts = _binned((logs - middle) / first)
    under = len(logs) - counts.sum()
    sds = np.exp(BODIES / np.sqrt(len(logs)))
    start = (_log_shares(tuple(fleets)) + under * np.log1p(-SHARES))[:, None, None]
    sizes = np.geomspace(LEAST_SIZE, max(LARGEST_SIZE, 1.2 * over.max(initial=0.0)), SIZES)
    weights = np.array([start + _likelihood(over / s, counts, sizes) - counts.sum() * np.log(s) for s in sds])
    total = np.cumsum(np.exp(weights - weights.max()).ravel())
    picked = np.searchsorted(total, (np.arange(KEPT) + 0.5) / KEPT * total[-1])
    sd, share, width, size = np.unravel_index(picked, weights.shape)
    wide, other = _spread_out(sds), _spread_out(SHARES)  # but slow GPUs stay as slow as they are
    return Tail(middle, first * sds[sd] * wide, SHARES[share] * other, sizes[size] / wide, WIDTHS[width])


@cache
def _log_shares(fleets: tuple[KnownFleet, ...]) -> Floats:
    return np.asarray(np.log(share_weights(SHARES, fleets)))


def _binned(z: Floats) -> tuple[Floats, Floats]:
    """Those above the median, and how many each stands for."""
    over = z[z > 0]
    if len(over) <= POINTS:
        return over, np.ones(len(over))
    ends = np.concatenate([np.linspace(0, 6, POINTS), np.geomspace(6.04, max(6.1, over.max() * 1.001), POINTS)])
    counts, _ = np.histogram(over, ends)
    sums, _ = np.histogram(over, ends, weights=over)
    some = counts > 0
    return sums[some] / counts[some], counts[some].astype(np.float64)


def _likelihood(z: Floats, counts: Floats, sizes: Floats) -> Floats:
    """[share, width, size]: log of the density at all points."""
    body = np.maximum(-0.5 * z**2, FLAT)
    wide = WIDTHS[:, None] * sizes
    slow = -0.5 * ((z - sizes[:, None]) / wide[..., None]) ** 2 - np.log(wide)[..., None]
    ratio = np.exp(np.clip(slow - body, -700, 700))
    return np.asarray([np.log1p(s * (ratio - 1)) @ counts for s in SHARES]) + float(body @ counts)


def _spread_out(grid: Floats) -> Floats:
    """Factors that spread what is picked of a grid of equal ratios evenly over the cells its points stand for."""
    return np.asarray((grid[1] / grid[0]) ** ((GOLDEN * np.arange(KEPT)) % 1 - 0.5))


# ---- A fleet of GPUs, each timed on the same work: how far apart they are, how many are slow, and what the slowest

FEWEST = 8  # GPUs that make a fleet
Z90 = 1.6448536269514722


@dataclass(frozen=True)
class Variation:
    """Standard deviations of log time: between GPUs, and run to run on one GPU (None: each was timed once)."""

    spatial: float
    temporal: float | None
    usual: float | None  # temporal, of most rows: a few bad ones do not count
    lasting: float  # share of the body's variance between GPUs that is found again in other runs of the same GPUs


@dataclass(frozen=True, eq=False)
class Fleet:
    """What per-GPU measurements tell."""

    name: str
    gpus: tuple[str, ...]
    factors: Floats  # of each, 1 for the median GPU
    rows: int
    variation: Variation
    tail: Tail
    skipped: tuple[tuple[str, str], ...] = ()

    @cached_property
    def distribution(self) -> Distribution:
        """Distribution of a GPU's factor: body and slow part at their estimates."""
        found = self.tail.numbers()
        body, share = LogNormal(float(np.exp(self.tail.middle)), found["sd"].value), found["share"].value
        slow = LogNormal(found["factor"].value, found["width"].value)
        return Mixture((body, slow), (1 - share, share))

    def largest(self, n: int) -> EffectEstimate:
        """The factor of the slowest of n GPUs, on average."""
        return self.tail.largest(n)

    def largest_quantile(self, n: int, p: float) -> EffectEstimate:
        """What the slowest of n GPUs does not exceed with probability p."""
        return self.tail.largest_quantile(n, p)

    def quantile(self, p: float) -> EffectEstimate:
        """The factor that a share p of GPUs does not exceed, p from a half on."""
        return self.tail.quantile(p)

    def rank_sd(self) -> EffectEstimate:
        """Standard deviation of the body, as far as it lasts from run to run."""
        return self.tail.numbers()["sd"].scaled(float(np.sqrt(self.variation.lasting)))

    def belief(self, kind: str = "products") -> Belief:
        """As noise of a class of work."""
        rank, found, own = self.rank_sd(), self.tail.numbers(), self.variation.usual or 0.0
        slow = SlowGpus(found["share"].value, LogNormal(found["factor"].value, found["width"].value))
        told = {f"spread.{kind}.rank": rank, "slow.share": found["share"]}
        told |= {"slow.factor.median": found["factor"], "slow.factor.log_sd": found["width"]}
        intervals = {p: e.interval for p, e in told.items()}
        if own:
            wide = np.exp(Z90 / np.sqrt(2 * max(self.rows - len(self.gpus), 1)))
            intervals[f"spread.{kind}.own"] = CredibleInterval(float(own / wide), float(own * wide))
        source = f"{self.name}: {len(self.gpus)} GPUs, {self.rows} rows"
        spread = WorkSpread(rank=rank.value, own=own)
        return Belief(NoiseModel({kind: spread}, slow), intervals, {f"spread.{kind}": source, "slow": source})


def fit_fleet(measured: MeasuredFleet, fleets: Sequence[KnownFleet] | None = None) -> Fleet:
    """From a table, and what other fleets say of slow GPUs (those of other sites that come with presage)."""
    names, own = np.unique(np.array(measured.gpus), return_inverse=True)
    if len(names) < FEWEST:
        what = f"has {len(names)} GPUs: it takes {FEWEST} at least to tell how far apart they are"
        raise InputError(measured.name, what)
    logs = _relative(measured, own)
    factors = np.array([np.median(logs[own == g]) for g in range(len(names))])
    shift = float(np.median(factors))
    tail = fit_tail(factors - shift, without(measured.name) if fleets is None else fleets)
    variation = _variation(logs, own, factors)
    kept = tuple(str(n) for n in names)
    return Fleet(measured.name, kept, np.exp(factors - shift), len(logs), variation, tail, measured.skipped)


def _relative(measured: MeasuredFleet, own: NDArray[np.int64]) -> Floats:
    """Log of each time over what is usual for its work."""
    logs = np.log(np.array(measured.times))
    works = np.array(measured.works)
    for work in np.unique(works):
        here = works == work
        each = [np.median(logs[here & (own == g)]) for g in np.unique(own[here])]
        logs[here] -= np.median(each)
    return np.asarray(logs)


def _variation(logs: Floats, own: NDArray[np.int64], factors: Floats) -> Variation:
    """Between GPUs by their medians, within them by sums of squares and by what is usual."""
    counts = np.bincount(own)
    spatial, free = float(factors.std(ddof=1)), len(logs) - len(counts)
    if not free:
        return Variation(spatial, None, None, 1.0)
    left = logs - (np.bincount(own, logs) / counts)[own]
    several = counts[own] > 1
    scale = np.sqrt(counts[own] / np.maximum(counts[own] - 1, 1))
    usual = float(np.median(np.abs(left * scale)[several])) / MAD
    return Variation(spatial, float(np.sqrt(np.sum(left**2) / free)), usual, _lasting(logs, own))


def _lasting(logs: Floats, own: NDArray[np.int64]) -> float:
    """Every other row of each GPU against the rest of its rows: what they share, of what is in their mean."""
    rows = [logs[own == g] for g in range(own.max() + 1)]
    halves = np.array([(np.median(r[::2]), np.median(r[1::2])) for r in rows if len(r) > 1])
    if len(halves) < FEWEST:
        return 1.0
    both, apart = body_sd(halves.sum(axis=1)), body_sd(halves[:, 0] - halves[:, 1])
    return max(0.0, 1 - (apart / both) ** 2)
