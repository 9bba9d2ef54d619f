"""A Strategy: how a model is trained on many ranks. Applied to one rank's captured step it gives the step of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeAlias

from presage.errors import PresageError, near
from presage.graph.graph import DTYPE_BYTES, Graph
from presage.parallel.ddp import Ddp, ddp
from presage.parallel.fsdp import Fsdp, fsdp
from presage.parallel.plan import Axis, ParallelPlan
from presage.parallel.rank_layout import RankLayout
from presage.parallel.tensor import tensor_parallel
from presage.parallel.zero import Zero, zero

Options: TypeAlias = Ddp | Fsdp | Zero


@dataclass(frozen=True)
class StrategyKind:
    """A kind of data parallelism: what it is called, what can be said about it, and what applies it."""

    about: str
    options: Options | None
    apply: Callable[..., Graph] | None


STRATEGIES = {
    "ddp": StrategyKind("DistributedDataParallel: gradients all-reduced in buckets", Ddp(), ddp),
    "fsdp": StrategyKind("FSDP2, ZeRO-3: parameters gathered block by block, gradients reduce-scattered", Fsdp(), fsdp),
    "zero1": StrategyKind(
        "ZeRO-1: gradients all-reduced, updates sharded, parameters gathered", Zero(), partial(zero, stage=1)
    ),
    "zero2": StrategyKind(
        "ZeRO-2: gradients reduce-scattered, updates sharded, parameters gathered", Zero(), partial(zero, stage=2)
    ),
    "zero3": StrategyKind("as fsdp", Fsdp(), fsdp),
    "tp": StrategyKind("tensor parallelism alone: linear pairs and attention heads cut over the ranks", None, None),
}


@dataclass(frozen=True)
class Strategy:
    """Data parallelism of some kind over groups of `tensor` ranks that share each layer."""

    name: str
    options: Options | None
    tensor: int = 1
    vocabulary: bool = False  # ranks that share a layer share out the classes too: embedding, head and loss

    def layout(self, ranks: int) -> RankLayout:
        """Ranks that share a layer are neighbours."""
        plan = ParallelPlan(tp=ranks if self.name == "tp" else self.tensor)
        if ranks % plan.tp:
            raise PresageError(f"{ranks} ranks cannot be split into groups of {plan.tp}: ranks = tensor x data")
        return RankLayout.of(plan, ranks)

    def step(self, graph: Graph, ranks: int) -> Graph:
        """One rank's step of the captured one, which is that of a model on one GPU."""
        layout = self.layout(ranks)
        if layout.size(Axis.TP) > 1:
            graph = tensor_parallel(graph, layout.size(Axis.TP), vocabulary=self.vocabulary)
        apply = STRATEGIES[self.name].apply
        return graph if apply is None else apply(graph, layout.size(Axis.DP), self.options)


def strategy(name: str, options: Mapping[str, str] | None = None, tensor: int = 1) -> Strategy:
    """A strategy by its name, with options as a user writes them."""
    if name not in STRATEGIES:
        raise PresageError(f"unknown strategy {name!r}: choose from {', '.join(STRATEGIES)}{near(name, STRATEGIES)}")
    default = STRATEGIES[name].options
    given = dict(options or {})
    if default is None:
        if given:
            raise PresageError(f"strategy {name} has no options, and was given {', '.join(given)}")
        return Strategy(name, None, tensor)
    known = [f.name for f in fields(default)]
    unknown = next((k for k in given if k not in known), None)
    if unknown is not None:
        raise PresageError(f"strategy {name} has no option {unknown!r}: choose from {', '.join(known)}")
    values = {k: _value(k, text, getattr(default, k)) for k, text in given.items()}
    return Strategy(name, replace(default, **values), tensor)


def _value(name: str, text: str, like: Any) -> Any:
    """An option's value, of the type its default has."""
    if isinstance(like, bool):
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise PresageError(f"option {name} is true or false, not {text!r}")
        return text.lower() in ("true", "1", "yes")
    if isinstance(like, float):
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise PresageError(f"option {name} is a number above 0, not {text!r}")
        return value
    if name.endswith("_dtype") and text not in DTYPE_BYTES:
        raise PresageError(f"option {name} is a dtype such as float32 or bfloat16, not {text!r}")
    return text
