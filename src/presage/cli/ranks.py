"""Options of `presage predict` for several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from presage.cli import complete
from presage.cli.options import option
from presage.errors import PresageError

if TYPE_CHECKING:
    from presage.hardware import Platform
    from presage.prediction.rank_set import RankOverride

RankCount = Annotated[
    int | None,
    option(
        "--ranks", "N", "Number of ranks (default: one GPU; with --platform or --strategy, those of a node).", min=1
    ),
]
StrategyName = Annotated[
    str | None,
    option(
        "--strategy",
        "NAME",
        "Parallel strategy: ddp, fsdp, zero1, zero2, zero3 or tp (default: the code's own, else ddp).",
        complete=complete.one_of(complete.STRATEGIES),
    ),
]
PlatformName = Annotated[
    str | None,
    option(
        "--platform",
        "NAME",
        "Platform the ranks run on (see `presage platforms`), or a .toml file.",
        complete=complete.platforms,
    ),
]
Tensor = Annotated[int, option("--tensor", "N", "Tensor-parallel size; the remaining ranks are data-parallel.", min=1)]
Options = Annotated[list[str], option("--option", "K=V", "Option of the strategy, e.g. bucket_cap_mb=50 (repeatable).")]
RankSpecs = Annotated[
    list[str],
    option(
        "--rank",
        "R:K=V,...",
        "Settings of one rank, or of several (2-5): speed=0.9 (GPU speed), host=1.3 (host time factor), or "
        "arguments of FUNCTION such as batch=16 (repeatable).",
    ),
]


@dataclass(frozen=True)
class RankOptions:
    """Options for several ranks."""

    platform: str
    ranks: int
    strategy: str | None  # None: the code's own, or ddp where it has none
    tensor: int
    options: dict[str, str]
    kinds: dict[int, RankOverride] = field(default_factory=dict)
    variants: tuple[tuple[str, ...], ...] = ()  # --arg values of the steps that some ranks run instead, K=V each


def parse_rank_options(
    gpu: str | None,
    platform: str | None,
    ranks: int | None,
    strategy: str | None,
    tensor: int,
    options: Sequence[str],
    specs: Sequence[str],
) -> RankOptions | None:
    """The options for several ranks, or None for one GPU."""
    if platform is None and strategy is None and ranks in (None, 1) and tensor == 1:
        if options or specs:
            raise PresageError("--option and --rank apply to several ranks: give --ranks or --platform")
        return None
    from presage.parallel.strategy import strategy as strategy_of

    place = _platform_of(gpu, platform)
    count = ranks or place.domain
    kinds, variants = _kinds(specs, count)
    given = dict(_pair(o, "--option") for o in options)
    strategy_of(strategy or "ddp", given, tensor)  # a mistake in it is told before the step is captured
    return RankOptions(platform or place.key, count, strategy, tensor, given, kinds, variants)


def _platform_of(gpu: str | None, platform: str | None) -> Platform:
    """The platform by name, or the default one of the GPU."""
    from presage.hardware import gpu as gpu_of
    from presage.hardware import platform as platform_of
    from presage.prediction.api import default_platform

    if platform is None:
        return default_platform(gpu)
    place = platform_of(platform)
    if gpu is not None and gpu_of(gpu).key != place.gpu.key:
        raise PresageError(f"--platform {platform} has {place.gpu.name}: omit --gpu, or choose another platform")
    return place


def _kinds(specs: Sequence[str], count: int) -> tuple[dict[int, RankOverride], tuple[tuple[str, ...], ...]]:
    """Ranks with their own settings, and the argument variants that some of them run."""
    from presage.prediction.rank_set import RankOverride

    kinds: dict[int, RankOverride] = {}
    variants: list[tuple[str, ...]] = []
    for spec in specs:
        places, colon, rest = spec.partition(":")
        values: Mapping[str, str] = dict(_pair(item, f"--rank {spec}") for item in rest.split(",")) if colon else {}
        if not values:
            raise PresageError(f"--rank {spec}: should be RANK:NAME=VALUE, such as 3:speed=0.8 or 2-5:host=1.3")
        own = tuple(f"{k}={v}" for k, v in values.items() if k not in ("speed", "host"))
        if own and own not in variants:
            variants.append(own)
        numbers = {k: _number(values[k], spec) for k in ("speed", "host") if k in values}
        step = variants.index(own) + 1 if own else 0
        kind = RankOverride(**numbers, step=step, arguments=tuple(_pair(item, spec) for item in own))
        for rank in _places(places, spec, count):
            if rank in kinds:
                raise PresageError(f"--rank {spec}: rank {rank} is given twice")
            kinds[rank] = kind
    return kinds, tuple(variants)


def _places(text: str, spec: str, count: int) -> range:
    first, _, last = text.partition("-")
    if not first.isdigit() or (last and not last.isdigit()):
        raise PresageError(f"--rank {spec}: {text!r} is not a rank or a range of ranks such as 2-5")
    found = range(int(first), int(last or first) + 1)
    if not found or found[-1] >= count:
        raise PresageError(f"--rank {spec}: ranks are 0 to {count - 1}")
    return found


def _number(text: str, spec: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PresageError(f"--rank {spec}: {text!r} is not a number") from None


def _pair(item: str, where: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise PresageError(f"{where}: {item!r} should be NAME=VALUE")
    return name.strip(), value.strip()
