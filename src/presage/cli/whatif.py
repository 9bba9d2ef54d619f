"""`presage whatif`: the predicted effect of edits on a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from presage.capture.variants import AS_WRITTEN
from presage.cli import complete
from presage.cli.graph import (
    Arguments,
    Assume,
    Limit,
    Module,
    OwnRanks,
    ScriptArguments,
    Step,
    StepAt,
    StepFunction,
    Strict,
    assuming,
    checked_pack,
    step_name,
)
from presage.cli.options import HostName, Json, PackFolder, Report, Seed, option, out_option
from presage.cli.output import bar, show_answer, status
from presage.errors import PresageError
from presage.scripts import LIMIT

if TYPE_CHECKING:
    from presage.graph.graph import Graph
    from presage.whatif import WhatIf

NO_EDITS = "give the edits: `presage whatif TRAIN.py --apply EDITS`, or --suggest; --list shows all edits"
Apply = Annotated[
    list[str],
    option(
        "--apply",
        "EDIT[=VALUE],...",
        "Edits to apply, in this order (repeatable; see --list).",
        complete=complete.edits,
    ),
]


Gpu = Annotated[
    str | None,
    option(
        "--gpu",
        "NAME",
        "GPU to predict for (see `presage gpus`), or a calibration pack's folder (default: h200).",
        complete=complete.gpus,
    ),
]
Everything = Annotated[bool, option("--all", "", "With --suggest: also list edits that do not apply, and why.")]
Combine = Annotated[int, option("--combine", "N", "With --suggest: most edits to combine.", min=1, max=8)]
Draws = Annotated[
    int | None, option("--draws", "N", "Runs to draw (default: 200, or 40 per suggestion).", min=1, max=1_000_000)
]


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
    gpu: Gpu = None,
    pack: PackFolder = None,
    host: HostName = None,
    ranks: OwnRanks = 1,
    apply: Apply = [],  # noqa: B006
    suggest: Annotated[bool, option("--suggest", "", "Try every edit and rank them by gain.")] = False,
    combine: Combine = 3,
    gpus: Annotated[str, option("--gpus", "NAME,...", "With --suggest: other GPUs to try as well.")] = "",
    everything: Everything = False,
    listed: Annotated[bool, option("--list", "", "List all edits and what each does.")] = False,
    draws: Draws = None,
    seed: Seed = 0,
    trace: Annotated[
        Path | None, out_option("--trace", "OUT.json", "Write the step before and after as a Perfetto trace.")
    ] = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Predict the effect of edits on a training step: speed-up with its interval, memory, and the reason.

    Before and after are drawn with the same random numbers (the same host, the same GPU), so the interval of the
    speed-up is narrower than that of the step times. An edit is one of --list, another GPU (gpu=b200), another host
    (host=1.5), another batch or sequence length (batch=16, seq=2048, arg:width=2048), or FILE.py:FUNCTION, your own
    function from Graph to Graph.

    presage whatif train.py --apply fused_adam,cuda_graph -- --batch_size 12

    presage whatif train.py:build --apply fused_adam,cuda_graph

    presage whatif train.py:build --arg batch=8 --apply batch=16 --apply checkpoint=blocks --trace out.json

    presage whatif train.py:build --suggest --gpus h100_sxm,b200 --report out.html

    presage whatif --list
    """
    if listed:
        from presage.report.whatif_answer import step_edits_answer

        show_answer(step_edits_answer(), json)
        return
    if (step is None and module is None) or bool(apply) == suggest:
        raise PresageError(NO_EDITS)
    named = step_name(step, words, arg, module, step_function, step_at, limit)
    capture = _as_rank(assuming(assume, strict), ranks)
    place = _place(pack, gpu)
    asked = _Question(named.name, named.arguments, place, host, draws, seed, trace, report, json, capture)
    if suggest:
        _suggest(asked, [g for g in gpus.split(",") if g], combine, everything)
    else:
        _apply(asked, apply)


def _place(pack: Path | None, gpu: str | None) -> str | Path:
    """The pack or the GPU to predict for."""
    folder, chip = checked_pack(pack, gpu)
    return folder or chip or "h200"


def _as_rank(capture: Callable[..., Graph], ranks: int) -> Callable[..., Graph]:
    """Captures as the first of so many ranks."""
    if ranks == 1:
        return capture
    return lambda *args, variant=AS_WRITTEN, **more: capture(*args, variant=replace(variant, ranks=ranks), **more)


@dataclass(frozen=True)
class _Question:
    """What --apply and --suggest have in common."""

    step: str
    arguments: Mapping[str, Any]
    gpu: str | Path
    host: str | None
    draws: int | None
    seed: int
    trace: Path | None
    report: Path | None
    json: str | None
    capture: Callable[..., Graph]


def _apply(q: _Question, edits: list[str]) -> None:
    from presage.prediction.step import DRAWS
    from presage.report.whatif_answer import whatif_answer
    from presage.whatif import parse_edits, what_if

    wanted = parse_edits(edits)
    with status(f"capturing and predicting {q.step}"):
        result = what_if(
            q.step, wanted, q.gpu, q.arguments, host=q.host, draws=q.draws or DRAWS, seed=q.seed, capture=q.capture
        )  # fmt: skip
    _draw(result, q.trace)
    show_answer(whatif_answer(result, q.report is not None), q.json, q.report, {"timeline": q.trace})


def _suggest(q: _Question, gpus: list[str], combine: int, everything: bool) -> None:
    from presage.prediction.machine import machine
    from presage.report.whatif_answer import suggest_answer
    from presage.whatif import suggestions
    from presage.whatif.suggest import DRAWS

    for name in gpus:
        machine(name)  # a mistake in its name is told before the step is captured
    with _bar() as tell:
        result = suggestions(
            q.step, q.gpu, q.arguments, host=q.host, gpus=gpus, combine=combine, draws=q.draws or DRAWS, seed=q.seed,
            capture=q.capture, tell=tell,
        )  # fmt: skip
    best = result.combination or next(iter(result.tried), None)
    if best is not None:
        _draw(best, q.trace)
    show_answer(suggest_answer(result, everything), q.json, q.report, {"timeline": q.trace})


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar that shows the edit being tried."""
    with bar("capturing") as shown:
        yield lambda what, done, all_: shown(done, all_, what)


def _draw(result: WhatIf, path: Path | None) -> None:
    """Write the step before and after, one below the other."""
    if path is None:
        return
    from presage.files import write_whole
    from presage.traces.perfetto import beside_trace

    names = ("as it is", f"with {', '.join(result.edits)}")
    lines = {name: p.timeline for name, p in zip(names, (result.base, result.edited), strict=True)}
    write_whole(path, beside_trace(lines))
