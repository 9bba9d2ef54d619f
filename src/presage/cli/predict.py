"""`presage predict`: time and memory of a training step, from its code."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from presage.cli import complete
from presage.cli.graph import (
    Arguments,
    Assume,
    Limit,
    Module,
    ScriptArguments,
    Step,
    StepAt,
    StepFunction,
    StepName,
    Strict,
    captured,
    captured_ranks,
    checked_pack,
    place_words,
    step_name,
)
from presage.cli.options import HostName, Json, NoiseFile, PackFolder, Report, Seed, StepDraws, TraceOut, option
from presage.cli.output import show_answer, status, write_timeline
from presage.cli.ranks import (
    Options,
    PlatformName,
    RankCount,
    RankOptions,
    RankSpecs,
    StrategyName,
    Tensor,
    parse_rank_options,
)
from presage.scripts import LIMIT
from presage.usercode import parse_arguments

if TYPE_CHECKING:
    from presage.prediction.step import StepResult

_GPU = "GPU to predict for (see `presage gpus`), or a calibration pack's folder (default: h200)."
Gpu = Annotated[str | None, option("--gpu", "NAME", _GPU, complete=complete.gpus)]

StepsPerRun = Annotated[
    int, option("--steps", "N", "Steps per run, of which the first two are warm-up.", min=2, max=1000)
]
KernelsFrom = Annotated[
    Literal["trace"] | None,
    option("--kernels-from", "trace", "Of a profiler's trace: keep the kernel times that it holds."),
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
    kernels_from: KernelsFrom = None,
    gpu: Gpu = None,
    pack: PackFolder = None,
    host: HostName = None,
    platform: PlatformName = None,
    ranks: RankCount = None,
    strategy: StrategyName = None,
    tensor: Tensor = 1,
    option: Options = [],  # noqa: B006
    rank: RankSpecs = [],  # noqa: B006
    draws: StepDraws = None,
    noise: NoiseFile = None,
    seed: Seed = 0,
    steps: StepsPerRun = 8,
    trace: TraceOut = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Predict the time and memory of a training step, with a 90% interval. Needs no GPU and allocates no weights.

    A script is run as it is, on a fake GPU, until its steps are alike. With --ranks, code that calls torch.distributed
    itself runs as torchrun would start it; other code is the step of one rank as on a single GPU, with the batch of
    that rank, and --strategy turns it into what each rank runs.

    presage predict train.py -- --batch_size 12

    presage predict -m package.train --gpu h100 -- --config small.yaml

    presage predict --ranks 64 --platform dgx-h100 train.py -- --batch_size 12

    presage predict train.py --gpu a100 --pack learned --host my_host.toml

    presage predict train.py:build --ranks 8 --strategy fsdp --pack learned

    presage predict trace_et.json --gpu h100 --assume allow_tf32=true

    presage predict train.py:build --ranks 8 --noise production --draws 10000

    presage predict step.presage --json - --trace out.json --report out.html
    """
    from presage.hardware import gpu_choice
    from presage.report.predict_answer import predict_answer

    folder, chip = checked_pack(pack, gpu)
    many = parse_rank_options(None if folder and platform else chip, platform, ranks, strategy, tensor, option, rank)
    named = step_name(step, words, arg, module, step_function, step_at, limit).with_assumptions(assume, strict)
    named = replace(named, recorded=kernels_from == "trace")
    with _as_only_rank() if ranks == 1 else nullcontext():
        result = _result(named, many, folder, chip, host, 200 if noise or draws is None else draws, steps)
        if noise is not None:
            result = _with_noise(result, noise, draws or 2_000, seed)
    if trace is not None:
        write_timeline(result, trace)
    notes = [choice] if gpu is not None and folder is None and (choice := gpu_choice(gpu)) else []
    answer, then = predict_answer(result, report is not None), _next(result, named, folder, chip, host, many)
    show_answer(answer, json, report, {"timeline": trace}, notes=notes, then=then)


def _with_noise(result: StepResult, noise: str, draws: int, seed: int) -> StepResult:
    from presage.prediction.step_noise import noisy_step

    with status("drawing steps"):
        return replace(result, spread=noisy_step(result, noise, draws, seed))


def _as_only_rank() -> AbstractContextManager[None]:
    from presage.capture.process_groups import ProcessGroups, environment

    return environment(ProcessGroups(), alone=True)


def _result(
    step: StepName,
    many: RankOptions | None,
    pack: Path | None,
    gpu: str | None,
    host: str | None,
    draws: int,
    steps: int,
) -> StepResult:
    if many is not None:
        return _ranks(step, many, pack, host, draws, steps)
    return _one(step, pack or gpu or "h200", host, draws, steps)


def _one(step: StepName, gpu: str | Path, host: str | None, draws: int, steps: int) -> StepResult:
    from presage.prediction.api import predict
    from presage.prediction.machine import capture_gpu, machine

    where = machine(gpu, host)  # reports an unknown GPU or host before the step is captured
    graphs = captured_ranks(step, capture_gpu(gpu, where))
    with status(f"predicting {step.name}"):
        return predict(graphs, gpu=gpu, host=host, draws=draws, steps=steps)


def _ranks(
    step: StepName, many: RankOptions, pack: Path | None, host: str | None, draws: int, steps: int
) -> StepResult:
    from presage.capture.variants import Variant
    from presage.hardware import platform
    from presage.prediction.api import predict_ranks, rank_graphs, rank_machine
    from presage.traces.trace_graph import is_trace

    place = platform(many.platform)
    rank_machine(place, host, pack)  # reports a pack of another GPU before the step is captured
    seen = Variant(per_node=place.domain, ranks=1 if many.strategy or many.tensor > 1 or many.options else many.ranks)
    if many.variants:
        own = [StepName(step.name, {**step.arguments, **parse_arguments(given)}) for given in many.variants]
        graphs = [captured(one, place.gpu.key) for one in (step, *own)]
    elif is_trace(step.name) or step.recorded:
        graphs = captured_ranks(step, place.gpu.key)
    else:
        graphs = rank_graphs(lambda r: captured(step, place.gpu.key, replace(seen, rank=r)), many.ranks)
    with status(f"predicting {step.name} on {many.ranks} ranks"):
        return predict_ranks(
            graphs,
            many.ranks,
            many.strategy,
            many.platform,
            options=many.options,
            tensor=many.tensor,
            kinds=many.kinds,
            host=host,
            pack=pack,
            draws=draws,
            steps=steps,
        )


def _next(
    result: StepResult, step: StepName, pack: Path | None, gpu: str | None, host: str | None, many: RankOptions | None
) -> list[object]:
    """The command to try next: edits of the step, or another strategy where memory, or what strategies add, matters."""
    same_host: list[object] = ["--host", host] if host else []
    if many is not None:
        if result.many is not None and not result.many.by_strategy:
            return []
        sharded = many.strategy in ("fsdp", "zero3")
        other = "ddp" if sharded else "fsdp"
        if (sharded and result.fits and result.bound != "gpu") or (not sharded and not result.fits):
            ranks: list[object] = ["--ranks", many.ranks, "--platform", many.platform, "--strategy", other]
            return ["predict", *step.words(*ranks, *place_words(pack, None), *same_host)]
    given = place_words(pack, gpu if many is None else result.basis.gpu.key)
    return ["whatif", *step.words(*given, *same_host, "--suggest")]
