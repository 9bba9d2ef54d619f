"""`presage graph`: the ops, FLOPs, bytes and memory of a training step, without running it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.capture.variants import AS_WRITTEN, Variant
from presage.cli import complete
from presage.cli.options import Json, option, out_option
from presage.cli.output import show_answer, status
from presage.errors import PresageError
from presage.scripts import LIMIT, MODULE, is_script
from presage.usercode import parse_arguments

if TYPE_CHECKING:
    from presage.graph.graph import Graph

SCRIPT = "Scripts"
Step = Annotated[
    str | None,
    typer.Argument(
        metavar="TRAIN.py|FILE.py:FUNCTION",
        show_default=False,
        help="A training script, run as it is with the arguments after --. Or a function: FUNCTION(device, **args) "
        "builds a model and returns a callable that runs one training step. Or a graph saved by `presage graph --out`, "
        "a PyTorch execution or profiler trace or Chakra trace (.json, .et, .gz), or a folder of one for each rank.",
    ),
]
ScriptArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="-- ARGUMENTS", show_default=False, help="The script's own arguments, as after `python train.py`."
    ),
]
Module = Annotated[
    str | None, option("-m", "MODULE", "A module as the script, as in `python -m MODULE`.", panel=SCRIPT)
]
StepFunction = Annotated[
    str,
    option(
        "--step",
        "FUNCTION",
        "A step is one call of this function (train_step, Trainer.training_step); by default it is what lies between "
        "two steps of the same optimizer.",
        panel=SCRIPT,
    ),
]
StepAt = Annotated[
    int | None,
    option("--step-at", "N", "Take step N; otherwise the first that is like one before it.", panel=SCRIPT, min=1),
]
Limit = Annotated[
    float, option("--limit", "SECONDS", "Stop the script if it has not come that far by then.", panel=SCRIPT, min=1.0)
]
OwnRanks = Annotated[
    int,
    option("--ranks", "N", "Run code that calls torch.distributed as torchrun starts it with so many ranks.", min=1),
]
SAVED = (
    "Save the graph: FILE.presage; or as a PyTorch execution trace (FILE.json) or a Chakra trace (FILE.et), of each "
    "rank, with kernel times predicted for --gpu."
)
ASSUMED = "Unknown values"
Assume = Annotated[
    list[str],
    option(
        "--assume",
        "FILE:LINE=VALUE",
        "What a value is that the code reads on this line and that a capture cannot know (repeatable). Of a trace: "
        "allow_tf32=true, cudnn.allow_tf32=false.",
        panel=ASSUMED,
    ),
]
Strict = Annotated[
    bool, option("--strict", "", "Refuse a step whose code branches on values that are not known.", panel=ASSUMED)
]
Arguments = Annotated[
    list[str], option("--arg", "K=V", "Argument of FUNCTION: a number, true, false, text, or a JSON list (repeatable).")
]


@dataclass(frozen=True)
class StepName:
    """The step that a command line names, with its arguments."""

    name: str
    arguments: Mapping[str, Any]
    given: tuple[str, ...] = ()  # of --arg
    assume: tuple[str, ...] = ()
    strict: bool = False
    recorded: bool = False  # with the kernel times of the trace

    def with_assumptions(self, assume: Sequence[str], strict: bool) -> StepName:
        """With the options on values that are not known."""
        return replace(self, assume=tuple(assume), strict=strict)

    def words(self, *options: object) -> list[object]:
        """The same step on the command line of another command, with options of that."""
        more = [word for pair in self.given for word in ("--arg", pair)]
        for key, name in (("step", "--step"), ("step_at", "--step-at"), ("limit", "--limit")):
            more += [name, str(self.arguments[key])] if key in self.arguments and is_script(self.name) else []
        argv = self.arguments.get("argv", ()) if is_script(self.name) else ()
        return [*self.name.split(" ", 1), *more, *options, *(["--", *argv] if argv else [])]


def step_name(
    step: str | None,
    words: Sequence[str],
    arg: Sequence[str],
    module: str | None,
    function: str = "",
    step_at: int | None = None,
    limit: float = LIMIT,
) -> StepName:
    """From the options that name a step."""
    if module is not None:
        step, words = f"{MODULE}{module}", [*([step] if step is not None else []), *words]
    if step is None:
        raise PresageError(
            "name the step: TRAIN.py, as in `presage predict train.py -- --batch_size 12`, or FILE.py:FUNCTION"
        )
    if not is_script(step):
        if words:
            raise PresageError(f"{words[0]}: only a script takes arguments of its own; those of FUNCTION are --arg K=V")
        if function or step_at is not None:
            raise PresageError(f"--step and --step-at choose the step of a script: {step} is one already")
        return StepName(step, parse_arguments(arg), tuple(arg))
    if arg:
        raise PresageError(f"--arg {arg[0]}: the arguments of a script go after --, as in: {step} -- --batch_size 12")
    values: dict[str, Any] = {"argv": list(words)} if words else {}
    values |= {"step": function} if function else {}
    values |= {"step_at": step_at} if step_at is not None else {}
    return StepName(step, values | ({"limit": limit} if limit != LIMIT else {}))


def command(
    step: Step = None,
    words: ScriptArguments = [],  # noqa: B006  (Typer reads the default, nothing changes it)
    arg: Arguments = [],  # noqa: B006
    module: Module = None,
    step_function: StepFunction = "",
    step_at: StepAt = None,
    limit: Limit = LIMIT,
    assume: Assume = [],  # noqa: B006
    strict: Strict = False,
    ranks: OwnRanks = 1,
    depth: Annotated[int, option("--depth", "N", "Module depth to list.", min=1)] = 2,
    out: Annotated[Path | None, out_option("--out --save", "FILE", SAVED)] = None,
    diff: Annotated[
        str | None, option("--diff", "OTHER.presage", "Show what changed from OTHER to this graph.")
    ] = None,
    gpu: Annotated[
        str | None,
        option("--gpu", "NAME", "Say whether the step fits in this GPU's memory.", complete=complete.gpus),
    ] = None,
    json: Json = None,
) -> None:
    """List what one training step runs: ops, FLOPs, bytes, parameters and activations, by module, phase and family.

    Needs no GPU and allocates no weights. FLOPs count GEMMs, convolutions and attention, two per multiply-add. Bytes
    are the minimum traffic: each input read once, each output written once. Activations are the tensors that the
    forward pass keeps for the backward pass.

    presage graph train.py -- --batch_size 12

    presage graph train.py:build --arg batch=8 --arg 'sizes=[64, 32]' --depth 3

    presage graph train.py:build --gpu h100 --diff batch8.presage

    presage graph train.py --ranks 8 --gpu h100 --save job.et
    """
    from presage.graph.diff import diff as compare
    from presage.hardware import gpu as gpu_of
    from presage.hardware import gpu_choice
    from presage.memory.step_memory import memory_profile
    from presage.report.graph_answer import graph_answer

    chip = None if gpu is None else gpu_of(gpu)
    notes = [choice] if gpu is not None and (choice := gpu_choice(gpu)) else []
    named = step_name(step, words, arg, module, step_function, step_at, limit)
    graphs = _of_ranks(named.with_assumptions(assume, strict), gpu or "h200", ranks)
    graph = graphs[0]
    other = captured(StepName(diff, {})) if diff is not None else None
    saved = [] if out is None else _save(graphs, out, gpu or "h200")
    changes = compare(other, graph) if other is not None else None
    answer = graph_answer(graphs, memory_profile(graph), depth, changes, chip)
    options = [*gpu_words(gpu), *(["--ranks", ranks] if ranks > 1 else [])]
    show_answer(
        answer,
        json,
        files={f"graph{f' {k}' if k else ''}": file for k, file in enumerate(saved)},
        notes=notes,
        then=["predict", *named.words(*options)],
    )


def _save(graphs: Sequence[Graph], path: Path, gpu: str) -> list[Path]:
    """Write a saved graph, or execution traces with predicted times, as the file's name says; returns the files."""
    from presage.graph import save
    from presage.prediction.api import own_times
    from presage.prediction.machine import machine
    from presage.traces.saved_trace import WRITERS, save_traces

    if not path.name.endswith(tuple(WRITERS)):
        save.write(graphs[0], path)
        return [path]
    where = machine(gpu)
    return save_traces(graphs, path, [[t.seconds for t in own_times(g, where)[0]] for g in graphs])


def _of_ranks(step: StepName, gpu: str, ranks: int) -> list[Graph]:
    """The graphs of ranks that differ; of code that runs as one rank, its own."""
    from presage.prediction.api import rank_graphs

    if ranks == 1:
        return captured_ranks(step, gpu)
    graphs = rank_graphs(lambda rank: captured(step, gpu, Variant(ranks=ranks, rank=rank)), ranks)
    if not graphs[0].groups:
        raise PresageError(f"{step.name} does not communicate: leave out --ranks (one rank's step is all there is)")
    return graphs


def gpu_words(gpu: str | None) -> list[object]:
    return [] if gpu is None else ["--gpu", gpu]


def checked_pack(pack: Path | None, gpu: str | None) -> tuple[Path | None, str | None]:
    """The pack of --pack (or of --gpu, where that is a folder), checked against the GPU that was named; and the GPU:
    that of the pack, where there is one."""
    from presage.costs.kernel_files import is_pack
    from presage.costs.learned_files import check_pack, pack_gpu

    if pack is None and gpu is not None and is_pack(gpu):
        pack, gpu = Path(gpu), None
    if pack is None:
        return None, gpu
    check_pack(pack, gpu)
    return pack, pack_gpu(pack)


def place_words(pack: Path | None, gpu: str | None) -> list[object]:
    """The words of a command on the same pack or GPU."""
    return ["--pack", pack] if pack is not None else gpu_words(gpu)


def captured(step: StepName, gpu: str = "h200", variant: Variant = AS_WRITTEN) -> Graph:
    """The graph of a script or of FILE.py:FUNCTION, as it runs on a GPU, or of a saved file."""
    seen = replace(variant, gpu=gpu)
    return assuming(step.assume, step.strict)(step.name, step.arguments, spinner=True, variant=seen)


def captured_ranks(step: StepName, gpu: str = "h200") -> list[Graph]:
    """The graphs of the ranks in a trace; of anything else, its one graph."""
    from presage.traces.trace_graph import is_trace, trace_graphs, with_recorded_kernels

    if not is_trace(step.name):
        return [captured(step, gpu)] if not step.recorded else with_recorded_kernels([])
    with status(f"reading {step.name}"):
        graphs = trace_graphs(step.name, _assumed(step.assume))
    return with_recorded_kernels(graphs) if step.recorded else graphs


def assuming(assume: Sequence[str], strict: bool) -> Callable[..., Graph]:
    """`capture_graph` with the options on values that are not known."""
    given = _assumed(assume)

    def run(step: str, arguments: Mapping[str, Any], **options: Any) -> Graph:
        graph = capture_graph(step, arguments, assume=given, **options)
        deciding = [a for a in graph.assumptions if a.decides and not a.given]
        if strict and deciding:
            first = deciding[0]
            more = f" (and {len(deciding) - 1} more)" if len(deciding) > 1 else ""
            raise PresageError(
                f"{first.line}: the code branches on {first.what} that is not known and taken to be {first.value}"
                f"{more}: give it with --assume {first.line}=VALUE, or leave out --strict"
            )
        return graph

    return run


def _assumed(given: Sequence[str]) -> dict[str, str]:
    from presage.traces.trace_graph import SETTINGS

    out = {}
    for item in given:
        line, equals, value = item.rpartition("=")
        if not equals or not value or not (line.rpartition(":")[2].isdigit() or line in SETTINGS):
            raise PresageError(f"--assume {item}: should be FILE:LINE=VALUE, as in train.py:41=true")
        out[line] = value
    return out


def capture_graph(
    step: str,
    arguments: Mapping[str, Any],
    *,
    spinner: bool = False,
    variant: Variant = AS_WRITTEN,
    assume: Mapping[str, str] | None = None,
) -> Graph:
    """The graph of a script or of FILE.py:FUNCTION with these arguments, or a saved graph."""
    from presage.graph import save
    from presage.prediction.api import step_graph

    spinner = spinner and not (save.is_saved(step) or step.endswith(save.SUFFIX))
    # what the user's code prints must not get between the lines of our own output
    with status(f"capturing {step}") if spinner else nullcontext(), redirect_stdout(sys.stderr):
        return step_graph(step, arguments, variant=variant, assume=assume)
