"""From training code, a function or a model to a prediction, on a machine without a GPU.

presage.predict("train.py", argv=["--batch_size", "12"], gpu="h200")  # a script as it is
presage.predict("train.py:build", gpu="h200")
presage.predict(build, gpu="h200")  # a function build(device), also of a notebook
presage.predict(model, batch, gpu="h200")
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from warnings import warn

from msgspec.structs import replace as with_fields

from presage.capture.rank_objects import sharing_objects
from presage.capture.variants import AS_WRITTEN, Variant
from presage.costs.kernel_model import OpTime
from presage.costs.learned_files import check_pack, pack_gpu
from presage.errors import PresageError
from presage.graph import save
from presage.graph.diff import alike
from presage.graph.graph import Graph
from presage.graph.rescale import with_batch
from presage.hardware import Platform, platforms
from presage.hardware import gpu as _gpu
from presage.hardware import platform as _platform
from presage.parallel.rank_layout import CodeLayout
from presage.parallel.strategy import Strategy
from presage.parallel.strategy import strategy as _strategy
from presage.prediction.machine import Machine, capture_gpu, kernel_times, machine
from presage.prediction.rank_results import collective_times, groups_of
from presage.prediction.rank_set import RankOverride, RankSet, code_rank_set, predict_rank_set, rank_set
from presage.prediction.step import DRAWS, STEPS, StepResult, predict_step, with_model_error
from presage.scripts import TrainingScript, is_script
from presage.traces.trace_graph import is_trace, trace_graphs
from presage.usercode import check_arguments

if TYPE_CHECKING:
    from presage.capture.model_step import ModelStep

Build: TypeAlias = Callable[..., Callable[[], Any]]  # build(device, **arguments) returns a callable that runs one step
MOST_UNLIKE = 16  # ranks that are captured one by one where their steps differ
StepSource: TypeAlias = str | Path | Build  # FILE.py, FILE.py:FUNCTION, a saved graph's file, or a function


def predict(
    step: StepSource | Graph | list[Graph] | Any,
    batch: Any = None,
    *,
    gpu: str | Path = "h200",
    host: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    optimizer: Any = None,
    loss: Any = None,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> StepResult:
    """Predict a training step on one GPU.

    `step`: a script, FILE.py or "-m MODULE", with its own `argv`; FILE.py:FUNCTION or a function build(device), with
    its `arguments`; a torch.nn.Module with an example `batch` (see `model_step` for `optimizer` and `loss`); a Graph,
    or those of several ranks; a file of a saved graph or of a trace (of execution, or of the profiler with
    shapes), or a folder of one for each rank. `host`: a known one's name, or a file (docs/hosts.md).
    """
    if isinstance(batch, str | Path):
        warn("predict(step, gpu) is now predict(step, gpu=gpu)", DeprecationWarning, 2)
        gpu, batch = batch, None
    if is_module(step) and batch is not None:
        step = model_step(step, batch, optimizer=optimizer, loss=loss)
    elif batch is not None or optimizer is not None or loss is not None:
        raise PresageError("batch, optimizer and loss go with a model: presage.predict(model, batch)")
    if argv is not None:
        if not is_script(step):
            raise PresageError('argv goes with a script: presage.predict("train.py", argv=["--batch_size", "12"])')
        arguments = {**(arguments or {}), "argv": list(argv)}
    where = machine(gpu, host)  # an unknown GPU is reported before the step is captured
    if isinstance(step, str | Path) and is_trace(step):
        step = trace_graphs(step)
    if not isinstance(step, Graph | list):
        step = step_graph(step, arguments, variant=Variant(gpu=capture_gpu(gpu, where)))
    graphs = step if isinstance(step, list) else [step]
    if graphs[0].groups:  # the code spreads itself over ranks
        return _predict_code(graphs, default_platform(capture_gpu(gpu, where)), where, draws, steps, seed)
    graph = graphs[0]
    times = kernel_times(graph, where)
    result = predict_step(
        graph, times, where.kernels.gpu, where.host, spread=where.spread(graph), draws=draws, steps=steps, seed=seed
    )
    notes = (*result.notes, *where.notes, *where.engine_notes(times), *where.host_notes(result.bound))
    return replace(result, notes=notes)


def _predict_code(
    graphs: Sequence[Graph], platform: Platform, where: Machine, draws: int, steps: int, seed: int
) -> StepResult:
    team = code_rank_set(graphs, platform, where)
    return with_model_error(predict_rank_set(team, where, draws=draws, steps=steps, seed=seed), "ranks")


def own_times(graph: Graph, where: Machine) -> tuple[list[OpTime], tuple[str, ...]]:
    """Kernel times of a step, and notes on them. Collectives of code that spreads itself over ranks take their time on
    the platform of the GPU, and the rank waits for no other."""
    times = kernel_times(graph, where)
    if not graph.groups:
        return times, ()
    place = default_platform(where.kernels.gpu.key)
    groups = groups_of(CodeLayout((graph.ranks,), (graph.groups,)), place)
    note = f"rank {graph.ranks[0]} alone: its collectives as on {place.name}, no waits for other ranks"
    return collective_times(graph, times, place, groups), (note,)


def rank_graphs(capture: Callable[[int], Graph], ranks: int) -> list[Graph]:
    """The steps of code that spreads itself over ranks, each with the ranks that run it; `capture` captures a rank's.

    Ranks that have the same place in all groups in which messages are sent run the same step: one of them is captured,
    and the last of them too, to see whether it does. Code that does not communicate has one step.
    """
    with sharing_objects():
        first = capture(0)
        if not first.groups:
            return [first]
        out, left = [], set(range(ranks))
        graph: Graph | None = first
        while left:
            graph = graph or capture(min(left))
            mine = [r for r in graph.ranks if r in left] or [min(left)]
            out += _told_apart(graph, mine, capture)
            left -= set(mine)
            graph = None
        return out


def _told_apart(graph: Graph, ranks: Sequence[int], capture: Callable[[int], Graph]) -> list[Graph]:
    """The step for all these ranks; or theirs by rank, where the last one's is not like the first one's."""
    if len(ranks) == 1:
        return [with_fields(graph, ranks=tuple(ranks))]
    last = capture(ranks[-1])
    if last.ranks[:1] != (ranks[-1],):
        note = f"the code sets its own rank: rank {last.ranks[0]} was captured, and stands for all {len(ranks)}"
        return [with_fields(graph, ranks=tuple(ranks), notes=(*graph.notes, note))]
    if alike(graph, last):
        return [with_fields(graph, ranks=tuple(ranks))]
    middle = capture(ranks[len(ranks) // 2]) if len(ranks) > 2 else last
    mates = {r for members in graph.groups.values() if ranks[-1] not in members for r in members} - {ranks[0]}
    known_ones = {ranks[len(ranks) // 2]: middle, ranks[-1]: last}
    if ranks[1] in mates:  # of the first one's group, and not of the last one's
        known_ones.setdefault(ranks[1], capture(ranks[1]))
    if all(alike(known, last) for known in known_ones.values()):  # the first does something of its own, such as logging
        return [with_fields(graph, ranks=tuple(ranks[:1])), with_fields(last, ranks=tuple(ranks[1:]))]
    if len(ranks) > MOST_UNLIKE:
        note = f"ranks run different steps: 3 of {len(ranks)} were captured, and stand for all"
        third = len(ranks) // 3
        parts = ranks[:third], ranks[third : 2 * third], ranks[2 * third :]
        three = zip((graph, middle, last), parts, strict=True)
        return [with_fields(g, ranks=tuple(some), notes=(*g.notes, note)) for g, some in three]
    kinds = [(graph, [ranks[0]])]
    for rank in ranks[1:]:
        own = known_ones.get(rank) or capture(rank)
        like = next((some for known, some in kinds if alike(known, own)), None)
        like.append(rank) if like else kinds.append((own, [rank]))
    return [with_fields(g, ranks=tuple(some)) for g, some in kinds]


def default_platform(gpu: str | None = None) -> Platform:
    """The platform of several ranks where only the GPU is given: a DGX node if there is one, else the largest."""
    wanted = _gpu(gpu or "h200")
    fits = [p for p in platforms() if p.gpu.key == wanted.key]
    if not fits:
        raise PresageError(f"no known platform has {wanted.name}: choose a platform (see `presage platforms`)")
    return max(fits, key=lambda p: (p.key.startswith("dgx"), p.domain))


def predict_ranks(
    step: StepSource | Graph | Sequence[Graph],
    ranks: int,
    strategy: str | Strategy | None = None,
    platform: str | Platform | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    tensor: int = 1,
    kinds: Mapping[int, RankOverride] | None = None,
    host: str | Path | None = None,
    pack: str | Path | None = None,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> StepResult:
    """Predict a training step on several ranks. `step` is that of one rank, captured as on a single GPU; of a model,
    `model_step(model, batch)`. Code that calls torch.distributed itself runs as each of the ranks, as torchrun would
    start it, and takes no `strategy`.

    `tensor`: tensor-parallel size. `kinds`: ranks with their own settings, by number; several graphs are their steps.
    `host`: that of every rank, a known one's name or a file (docs/hosts.md). `pack`: the folder of a pack of the
    platform's GPU, whose kernel times every rank gets.
    """
    given = {"options": options, "tensor": tensor, "kinds": kinds, "host": host, "pack": pack}
    team = rank_set_of(step, ranks, strategy, platform, arguments, **given)  # type: ignore[arg-type]
    where = rank_machine(team.platform, host, pack)
    result = predict_rank_set(team, where, draws=draws, steps=steps, seed=seed)
    return with_model_error(result, "ranks") if ranks > 1 else result


def rank_set_of(
    step: StepSource | Graph | Sequence[Graph],
    ranks: int,
    strategy: str | Strategy | None = None,
    platform: str | Platform | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    tensor: int = 1,
    kinds: Mapping[int, RankOverride] | None = None,
    host: str | Path | None = None,
    pack: str | Path | None = None,
) -> RankSet:
    """The ranks of a job with their tasks, for predictions and timelines."""
    usual = None if pack is None else pack_gpu(Path(pack))
    place = _platform(platform) if isinstance(platform, str) else platform or default_platform(usual)
    own = strategy is None and tensor == 1 and not options
    if isinstance(step, str | Path) or callable(step):
        source, seen = step, Variant(gpu=place.gpu.key, ranks=ranks if own else 1, per_node=place.domain)
        graphs = rank_graphs(lambda r: step_graph(source, arguments, variant=replace(seen, rank=r)), ranks)
    else:
        graphs = [step] if isinstance(step, Graph) else list(step)
    where = rank_machine(place, host, pack)
    if any(g.groups for g in graphs):
        if not own or kinds:
            raise PresageError(
                f"the code spreads itself over ranks already ({', '.join(graphs[0].groups)}): leave out the strategy, "
                "its options and settings of single ranks"
            )
        return code_rank_set(graphs, place, where)
    way = _strategy(strategy or "ddp", options, tensor) if not isinstance(strategy, Strategy) else strategy
    return rank_set(graphs, place, way, ranks, where, kinds)


def rank_machine(place: Platform, host: str | Path | None = None, pack: str | Path | None = None) -> Machine:
    """The machine of every rank on a platform; with a pack of its GPU, that pack's."""
    if pack is None:
        return machine(place.gpu.key, host)
    check_pack(Path(pack), place.gpu.key)
    return machine(pack, host)


def model_step(model: Any, batch: Any, *, optimizer: Any = None, loss: Any = None) -> ModelStep:
    """The training step of a torch.nn.Module on an example batch, wherever presage takes a step.

    The batch is a tensor, a tuple (model(*batch)) or a dict (model(**batch)). `optimizer`: a class or function of the
    parameters, or an optimizer (default: AdamW). `loss`: a function of (output, batch) (default: the output's own
    loss, else its mean). The model is neither changed nor allocated again.
    """
    if not is_module(model):
        raise PresageError(f"model_step takes a torch.nn.Module and a batch, not {type(model).__name__}")
    return _capture_room().ModelStep(model, batch, optimizer, loss)  # type: ignore[no-any-return]


def is_module(value: Any) -> bool:
    """Whether it is a torch.nn.Module, without loading torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def step_graph(
    step: StepSource,
    arguments: Mapping[str, Any] | None = None,
    *,
    variant: Variant = AS_WRITTEN,
    assume: Mapping[str, str] | None = None,
) -> Graph:
    """The graph of a script, of FILE.py:FUNCTION or of a function, captured with these arguments (which needs torch),
    or of a file.

    A script's arguments: `argv`, `step` (its function that runs one step), `step_at` and `limit`.
    `variant`: changes made around the code during the capture. `assume`: values for what the code reads and is not
    known, by line: {"train.py:41": "true"}.
    """
    values = dict(arguments or {})
    if is_script(step):
        script = TrainingScript.of(str(step), values)
        return _capture_room().capture_script(script, variant=variant, assume=assume)  # type: ignore[no-any-return]
    if isinstance(step, str | Path):
        name = str(step)
        if save.is_saved(name) or name.endswith(save.SUFFIX):
            if values:
                raise PresageError(f"{name} is a saved graph, which takes no arguments")
            return save.read(name)
        if is_trace(name):
            return _traced(name, values, variant, assume)
        function: Build = _capture_room().load(name, variant)
    else:
        if is_module(step):
            raise PresageError("give an example batch with the model: presage.predict(model, batch)")
        if not callable(step):
            raise PresageError(f"a step is FILE.py:FUNCTION, a function, a model or a Graph, not {type(step).__name__}")
        function, name = step, getattr(step, "__name__", type(step).__name__)
    check_arguments(function, values)
    graph: Graph = _capture_room().capture(function, values, source=name, variant=variant, assume=assume)
    shapes = getattr(function, "shapes", {})  # of a model's batch
    return with_fields(graph, arguments={**shapes, **graph.arguments}, notes=(*graph.notes, *_assumed(function)))


def _traced(path: str, values: Mapping[str, Any], variant: Variant, assume: Mapping[str, str] | None) -> Graph:
    """The step of a trace, with another batch where that is asked for; what needs the code is refused."""
    changed = [f.name for f in fields(variant) if f.name not in ("gpu", "ranks", "rank", "per_node")]
    needs = [name for name in changed if getattr(variant, name) != getattr(AS_WRITTEN, name)]
    if needs or (other := [name for name in values if name != "batch"]):
        raise PresageError(f"{path}: {(needs or other)[0]} needs the code, and a trace has none: give TRAIN.py")
    graph = trace_graphs(path, assume)[0]
    return graph if "batch" not in values else with_batch(graph, int(values["batch"]))


def register_op(
    name: str, *, cost: Callable[..., Mapping[str, float]], outputs: Callable[..., Any] | None = None
) -> None:
    """Say what a custom op, a Triton kernel or an extension's function costs.

    `name`: "mylib::pool" (an op of torch.library), "triton::add_kernel" (a function of @triton.jit) or
    "my_ext.forward" (a function of a module). `cost(*args)` is called with its arguments and returns a dict: "flops"
    and "bytes", which are priced at the rates that kernels of the GPU reach, or "seconds". `outputs(*args)` returns
    tensors like those it returns, for what has no fake implementation.
    """
    _capture_room().register_op(name, cost=cost, outputs=outputs)


def _assumed(function: Build) -> tuple[str, ...]:
    return tuple(getattr(function, "notes", ()))


def _capture_room() -> ModuleType:
    """presage.capture where torch can be loaded, or an error that says how to get it."""
    from presage import capture

    if find_spec("torch") is None:
        raise PresageError(
            "capturing a training step needs torch (its CPU build is enough): pip install 'presage[torch]'"
        )
    return capture
