"""`presage graph`: the ops, FLOPs, bytes and memory of a training step, without running it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.capture.variants import AS_WRITTEN, Variant
from presage.cli import complete
from presage.cli.options import Json, option, out_option
from presage.cli.output import show_answer, status
from presage.usercode import parse_arguments

if TYPE_CHECKING:
    from presage.graph.graph import Graph

Step = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="FUNCTION(device, **args) builds a model and returns a callable that runs one training step. "
        "Or a graph saved by `presage graph --out`.",
    ),
]
Arguments = Annotated[
    list[str], option("--arg", "K=V", "Argument of FUNCTION: a number, true, false, text, or a JSON list (repeatable).")
]


def command(
    step: Step,
    arg: Arguments = [],  # noqa: B006  (Typer reads the default, nothing changes it)
    depth: Annotated[int, option("--depth", "N", "Module depth to list.", min=1)] = 2,
    out: Annotated[Path | None, out_option("--out", "FILE.presage", "Save the graph to a file.")] = None,
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

    presage graph train.py:build --arg batch=8 --arg 'sizes=[64, 32]' --depth 3

    presage graph train.py:build --gpu h100

    presage graph train.py:build --arg batch=16 --diff batch8.presage
    """
    from presage.graph.diff import diff as compare
    from presage.hardware import gpu as gpu_of
    from presage.hardware import gpu_choice
    from presage.memory.step_memory import memory_profile
    from presage.report.graph_answer import graph_answer

    chip = None if gpu is None else gpu_of(gpu)
    notes = [choice] if gpu is not None and (choice := gpu_choice(gpu)) else []
    graph = graph_from_options(step, arg)
    other = graph_from_options(diff, ()) if diff is not None else None
    if out is not None:
        from presage.graph import save

        save.write(graph, out)
    changes = compare(other, graph) if other is not None else None
    answer = graph_answer(graph, memory_profile(graph), depth, changes, chip)
    show_answer(answer, json, files={"graph": out}, notes=notes, then=["predict", *same_step(step, arg, gpu)])


def same_step(step: str, arguments: Sequence[str], gpu: str | None) -> list[object]:
    """The words that name this step on the command line, for a command to try next."""
    given = [word for pair in arguments for word in ("--arg", pair)]
    return [step, *given, *(["--gpu", gpu] if gpu is not None else [])]


def graph_from_options(step: str, arguments: Sequence[str]) -> Graph:
    """The graph of FILE.py:FUNCTION, captured with these arguments, or of a saved file."""
    return capture_graph(step, parse_arguments(arguments), spinner=True)


def capture_graph(
    step: str, arguments: Mapping[str, Any], *, spinner: bool = False, variant: Variant = AS_WRITTEN
) -> Graph:
    """The graph of FILE.py:FUNCTION with argument values, or a saved graph."""
    from presage.graph import save
    from presage.prediction.api import step_graph

    spinner = spinner and not (save.is_saved(step) or step.endswith(save.SUFFIX))
    # what the user's code prints must not get between the lines of our own output
    with status(f"capturing {step}") if spinner else nullcontext(), redirect_stdout(sys.stderr):
        return step_graph(step, arguments, variant=variant)
