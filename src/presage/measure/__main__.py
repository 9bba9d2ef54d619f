"""Run a training step on this machine's GPU and compare the measurement with the prediction.

A training script is run as it is, with the arguments after --, until its steps have been timed. FUNCTION(device,
**args) of FILE.py builds a model and returns a callable that runs one training step, as for `presage predict`. 10
warm-up steps are run, about 2.5 seconds of steps back to back, and 2 steps under the profiler. Needs only Python, torch
and numpy, and an otherwise idle GPU.

Examples:
  presage measure train.py -- --batch_size 12
  presage measure -m package.train --json measured.json -- --config small.yaml
  presage measure train.py:build --arg batch=8 --host my_host.toml
  presage measure train.py --save-pack learned/ -- --batch_size 12
  presage measure train.py:build --predicted prediction.json --json measured.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.hardware import gpu as gpu_facts
from presage.measure.activity import Activity, profiled
from presage.measure.prediction import Prediction, can_predict, predict, read
from presage.measure.result import MeasureResult, brief, page, to_json
from presage.measure.saved_pack import PackRecorder
from presage.measure.timing import ScriptTimer, StopScript, Timing, cuda_torch, timed
from presage.scripts import LIMIT, MODULE, ScriptRun, StepWatch, TrainingScript, alarm, is_script
from presage.usercode import load, parse_arguments, user_code_line


def main(argv: list[str] | None = None) -> None:
    args = _arguments(sys.argv[1:] if argv is None else argv)
    values, told = args.values, read(args.predicted) if args.predicted else None
    recorder = PackRecorder(args.save_pack, args.like) if args.save_pack is not None else None
    torch = cuda_torch("measuring", " (presage predict needs none)")
    name = torch.cuda.get_device_name()
    why = ""
    with redirect_stdout(sys.stderr):  # what the user's code prints must not get between the lines of our own output
        if told is None:
            told, why = _own_prediction(args, name)
        if args.script is not None:
            timing, activity = _timed_script(torch, args.script, args.steps, recorder)
        else:
            build = load(args.step)
            timing, step = _users(args.step, lambda: timed(torch, lambda: _step(build("cuda", **values)), args.steps))
            activity = _users(args.step, lambda: profiled(torch, step, recorder))
        pack = recorder.save() if recorder is not None else None
    result = MeasureResult(args.step, values, _machine(torch, name), timing, activity, told, why, pack)
    if args.json is not None:
        data = json.dumps(_finite(to_json(result)), indent=2) + "\n"
        if args.json == "-":
            print(data, end="")
            return
        write_whole(args.json, data.encode())
    print(brief(result) if args.quiet else page(result))


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="presage measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument(
        "step", nargs="?", metavar="TRAIN.py|FILE.py:FUNCTION", help="Script, or function that builds the step."
    )
    out.add_argument("-m", dest="module", metavar="MODULE", help="A module as the script, as in `python -m MODULE`.")
    out.add_argument("--step", dest="function", default="", metavar="FUNCTION", help="A step is one call of it.")
    out.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="Stop the script after that time.")
    out.add_argument("--arg", action="append", default=[], metavar="K=V", help="Argument of FUNCTION (repeatable).")
    out.add_argument(
        "--steps", type=_positive, metavar="N", help="Number of timed steps (default: about 2.5 seconds of them)."
    )
    out.add_argument("--json", metavar="FILE|-", help="Write JSON to FILE, or to stdout with '-'.")
    out.add_argument("-q", "--quiet", action="store_true", help="Print only the step time.")
    out.add_argument(
        "--predicted", type=Path, metavar="PRED.json", help="Prediction written by `presage predict --json`."
    )
    out.add_argument(
        "--host", metavar="FILE|NAME", help="Host to predict for, as in `presage predict` (see `presage hosts`)."
    )
    out.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="Predict with this pack's kernels, as in `presage predict`."
    )
    out.add_argument(
        "--save-pack",
        type=Path,
        metavar="DIR",
        help="Learn this GPU's kernels from the profiled steps into a new pack.",
    )
    out.add_argument(
        "--like", metavar="NAME", help="With --save-pack: the GPU most like this one, where it is not listed."
    )
    out.add_argument("--no-predict", action="store_true", help="Do not predict on this machine.")
    return out


def _arguments(words: list[str]) -> argparse.Namespace:
    """With `values` of FUNCTION's arguments, or the `script` and, in `words`, what names the step to `predict`."""
    cut = words.index("--") if "--" in words else len(words)
    args, argv = _parser().parse_args(words[:cut]), words[cut + 1 :]
    if args.module is not None:
        args.step, argv = f"{MODULE}{args.module}", [*([args.step] if args.step else []), *argv]
    if args.step is None:
        raise PresageError("name the step: TRAIN.py, as in `presage measure train.py -- --batch_size 12`")
    if args.like is not None and args.save_pack is None:
        raise PresageError("--like goes with --save-pack DIR")
    args.script, args.values, args.argv = None, parse_arguments(args.arg), argv
    args.words = [*args.step.split(" ", 1), *(word for a in args.arg for word in ("--arg", a))]
    if is_script(args.step):
        args.script = TrainingScript.of(args.step, {"argv": argv, "step": args.function, "limit": args.limit})
        args.values = args.script.arguments
        args.words += ["--step", args.function] if args.function else []
    return args


def _timed_script(
    torch: Any, script: TrainingScript, steps: int | None, pack: PackRecorder | None
) -> tuple[Timing, Activity]:
    timer = ScriptTimer(torch, steps, pack)

    def stop() -> None:
        raise StopScript

    def run(process: ScriptRun) -> None:
        with StepWatch(script, timer).following(), alarm(script.limit, stop):
            process.run()

    with ScriptRun(script).prepared() as process:
        try:
            _users(script.name, lambda: run(process))
        except (StopScript, SystemExit) as e:
            if isinstance(e, SystemExit) and e.code not in (0, None):
                raise PresageError(f"{script.name} ended before it was timed: {process.last_words(e)}") from e
        except PresageError:
            if not timer.done:
                raise
        timing = timer.timing()
    assert timer.activity is not None
    return timing, timer.activity


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("should be 1 or more")
    return value


def _own_prediction(args: argparse.Namespace, gpu: str) -> tuple[Prediction | None, str]:
    """What this presage says of the step, or why it says nothing."""
    if args.no_predict:
        return None, ""
    if not can_predict():
        return None, "not predicted: presage is only partly installed here; give --predicted PRED.json"
    try:
        return predict(args.words, args.argv, _place(args.pack, gpu), args.host), ""
    except PresageError as e:
        return None, f"not predicted: {e}"


def _place(pack: Path | None, gpu: str) -> str:
    """What to predict for: this GPU, or a pack of it."""
    if pack is None:
        return gpu_facts(gpu).key
    from presage.costs.learned_files import check_pack

    check_pack(pack, gpu)
    return str(pack)


def _step(made: Any) -> Callable[[], Any]:
    if not callable(made):
        raise PresageError(f"it must return a callable that runs one step, not {made!r}")
    return made  # type: ignore[no-any-return]


def _users(source: str, run: Callable[[], Any]) -> Any:
    """What goes wrong in the user's code is told with the user's line."""
    try:
        return run()
    except PresageError:
        raise
    except Exception as e:
        raise PresageError(f"{user_code_line(e) or source}: {type(e).__name__}: {e}") from e


def _machine(torch: Any, name: str) -> dict[str, Any]:
    cudnn = torch.backends.cudnn.version()
    return {"gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn}


def _finite(value: Any) -> Any:
    """NaN is not JSON: unknown numbers become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    try:
        main()
    except PresageError as error:
        print(f"presage: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
