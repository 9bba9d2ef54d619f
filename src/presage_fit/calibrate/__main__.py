"""Measure this machine's GPU into a calibration pack, or with --host only its host, which takes seconds and no GPU.

A pack is a folder of raw measurements that predictions are fitted to.

What is measured, on random data, with warm-up and repeats:
  kernels   every kernel family (GEMM, convolution, attention, ...) over shapes drawn from a seed, with warm and cold
            caches
  host      host time of ops with and without the profiler; launch and synchronisation latencies
  copies    bandwidths within the device and to and from the host
  power     clocks under sustained load

The sweeps of kernel families take about 20 minutes on an H200; those of whole nets (conv_net, layers, recurrent,
various) come last and take longer, less with --turns. The command stops after --minutes; run it again to continue
where it stopped. Needs only Python, torch and numpy, and an otherwise idle GPU: on a bare machine, copy the folders
presage and presage_fit and run `python -m presage_fit.calibrate` with the same options.

Without a GPU, --from learns from PyTorch profiler traces recorded with shapes (of any models, on one kind of GPU): each
kernel family is corrected by what its calls took, over what is known of that GPU, or of the one it is most like.

--host FILE.toml measures what single calls of Python, PyTorch's dispatcher and autograd cost this machine's processor,
and where there is a GPU calls that launch kernels: predict, whatif, measure and job take the file as --host.

Examples:
  presage calibrate --host my_host.toml
  presage calibrate --out my_gpu/
  presage calibrate --out my_gpu/ --family gemm --minutes 5
  presage pack my_gpu/
  presage calibrate --from step.json.gz other.json.gz --out learned/
  presage calibrate --from profiler_folder/ --out learned/
  presage calibrate --from step.json.gz --like h100_sxm --out learned/    (a GPU that is not listed)
  presage predict train.py --pack learned/
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.measure.timing import cuda_torch
from presage.pool.processes import end_with_parent
from presage_fit.calibrate.host import copies, host_costs, latencies
from presage_fit.calibrate.host_file import calibrate_host, processor
from presage_fit.calibrate.measure import REPEATS, Flush, Turn, cache_reuse, profile_batch, read_batch, take_turn
from presage_fit.calibrate.power import GpuSensor, sustained
from presage_fit.calibrate.resume import StuckDraws, check_same_draws, check_same_machine, count_rows, only_run
from presage_fit.calibrate.sweeps import FAMILIES, draw

BATCH = 100
NEVER_BACK = "did not come back when it was last tried"
VERSION = 2
Progress = Callable[[str], None]


def header(torch: Any) -> dict[str, Any]:
    gpu, sensor = torch.cuda.get_device_properties(0), GpuSensor()
    return {
        "presage_pack": VERSION,
        "gpu": gpu.name,
        "sms": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "l2_bytes": getattr(gpu, "L2_cache_size", 0),
        "power_limit_W": sensor.limit_watts(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": sensor.driver(),
        "host": processor(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": REPEATS,
    }


def print_progress(text: str) -> None:
    """Write a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def sweep(
    torch: Any,
    name: str,
    out: Path,
    end: float,
    seed: int,
    pool: ProcessPoolExecutor,
    tell: Progress = print_progress,
    turn: Turn = nullcontext,
) -> bool:
    """Measure a family's draws that are not there yet; whether it is complete. Traces are read in other processes."""
    path, draws, flush, sensor = out / f"{name}.jsonl", draw(name, seed), Flush(torch), GpuSensor()
    if path.with_suffix(".jsonl.gz").exists():
        tell(f"{name}: packed already; give another folder to add to it and merge them with presage pack")
        return True
    at = begun = count_rows(path)
    check_same_draws(path, draws)
    start, stuck = time.monotonic(), StuckDraws(out, name)
    waiting: list[tuple[list[dict[str, Any]], dict[str, str], int, Future[Any]]] = []
    size = BATCH if FAMILIES[name].draws > 1000 else BATCH // 4
    with path.open("a") as f:
        while at < len(draws) and time.monotonic() < end:
            batch = draws[at : at + size]
            failed = {str(k): NEVER_BACK for k in range(len(batch)) if at + k in stuck.draws}
            calls = [
                (str(k), partial(FAMILIES[name].build, torch, p)) for k, p in enumerate(batch) if str(k) not in failed
            ]
            trace, refused = profile_batch(torch, calls, flush, partial(_under_way, stuck, at), turn)
            stuck.done()
            waiting.append(
                (batch, failed | refused, sensor.mhz(), pool.submit(read_batch, trace, [n for n, _ in calls]))
            )
            at += len(batch)
            torch.cuda.empty_cache()
            _write(f, waiting, keep=3)
            left = (time.monotonic() - start) / (at - begun) * (len(draws) - at)
            tell(f"{name}: {at}/{len(draws)}, about {left:.0f} s to go")
        _write(f, waiting, keep=0)
    return at >= len(draws)


def _under_way(stuck: StuckDraws, first: int, name: str) -> None:
    stuck.at(first + int(name))


def _write(f: Any, waiting: list[Any], keep: int) -> None:
    """Append what has been read, in order; at most `keep` batches stay in flight."""
    while len(waiting) > keep:
        batch, failed, mhz, job = waiting.pop(0)
        rows = job.result()
        for k, p in enumerate(batch):
            result = {"error": failed[str(k)]} if str(k) in failed else {"mhz": mhz, "ops": rows[str(k)]}
            f.write(json.dumps({"p": p, **result}, separators=(",", ":")) + "\n")
        f.flush()


def measure_once(out: Path, name: str, measure: Any, tell: Progress = print_progress) -> None:
    """Write NAME.json with one small measurement, unless it exists."""
    path = out / f"{name}.json"
    if not path.exists():
        write_whole(path, json.dumps(measure(), separators=(",", ":")).encode())
        tell(f"{name} done")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="presage calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--out", type=Path, metavar="PACK", help="Folder of the pack; existing measurements are kept.")
    out.add_argument(
        "--host",
        type=Path,
        nargs="?",
        const=Path("host.toml"),
        metavar="FILE.toml",
        help="Measure the host alone, within 30 s and without a GPU, into this file (default: host.toml).",
    )
    out.add_argument("--minutes", type=float, default=20.0, metavar="M", help="Time limit, min (default: 20).")
    out.add_argument(
        "--family",
        action="append",
        choices=sorted(FAMILIES),
        help="Measure only this kernel family (repeatable; default: all).",
    )
    out.add_argument(
        "--seconds-each", type=float, default=0.0, metavar="S", help="Time limit per family, s (default: none)."
    )
    out.add_argument("--seed", type=int, default=0, metavar="N", help="Random seed of the shapes (default: 0).")
    out.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="Share the GPU with other calibrate commands that name the same file, each with its own --out and "
        "--seed: one times kernels while the others prepare theirs, several times faster.",
    )
    out.add_argument(
        "--from",
        dest="traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="Learn from profiler traces recorded with shapes, or folders of them; needs no GPU.",
    )
    out.add_argument("--gpu", metavar="NAME", help="With --from: the traces' GPU (default: as they name it).")
    out.add_argument("--like", metavar="NAME", help="With --from: the listed GPU whose models are corrected.")
    out.add_argument("--json", metavar="FILE|-", help="Write JSON to FILE, or to stdout with '-'.")
    out.add_argument("-q", "--quiet", action="store_true", help="Print only the answer: no progress.")
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if (args.out is None) == (args.host is None):
        raise PresageError("give --out PACK to measure the GPU, or --host FILE.toml to measure the host alone")
    if args.host is not None:
        _measure_host(args)
        return
    progress = (lambda _: None) if args.quiet else print_progress
    if args.traces:
        from presage_fit.learn import command

        command(args.traces, args, progress)
        return
    if args.gpu or args.like:
        raise PresageError("--gpu and --like go with --from TRACE: without traces this machine's GPU is measured")
    torch = cuda_torch("calibrating", ": run it where the GPU is")
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    with only_run(args.out):
        _measure_gpu(torch, args, end, progress)


def _measure_gpu(torch: Any, args: argparse.Namespace, end: float, progress: Progress) -> None:
    """All of a pack that is not there yet, until time is up."""
    here = header(torch)
    check_same_machine(args.out, here)
    for name, measure in (
        ("header", lambda: here),
        ("latencies", partial(latencies, torch)),
        ("copies", partial(copies, torch)),
        ("host", partial(host_costs, torch)),
        ("cache", partial(cache_reuse, torch)),
        ("power", partial(sustained, torch)),
    ):
        measure_once(args.out, name, measure, progress)
    families = args.family or list(FAMILIES)
    turn = nullcontext if args.turns is None else partial(take_turn, args.turns)
    with ProcessPoolExecutor(3, get_context("spawn"), end_with_parent) as pool:
        for name in families:
            limit = min(end, time.monotonic() + args.seconds_each) if args.seconds_each else end
            if not sweep(torch, name, args.out, limit, args.seed, pool, progress, turn) and time.monotonic() > end:
                break
    _finish(args.out, families, args.seed, args.json)


def _measure_host(args: argparse.Namespace) -> None:
    """Measure the host into its file, and say what to do with it."""
    found = calibrate_host(args.host, (lambda _: None) if args.quiet else print_progress)
    data = json.dumps(found, indent=2) + "\n"
    if args.json == "-":
        print(data, end="")
        return
    if args.json is not None:
        write_whole(args.json, data.encode())
    changed = "; its pace changed meanwhile (other work, or a shared processor): measure again when it is idle"
    busy = changed if found["busy"] else ""
    many, seconds = len(found["us"]), found["seconds"]
    print(f"{args.host}: {found['name']}, {many} calls in {seconds:.0f} s{busy}; see presage hosts {args.host}")


def _finish(out: Path, families: list[str], seed: int, path: str | None) -> None:
    """Report what the pack holds now, and whether the sweep is complete."""
    wanted = {name: len(draw(name, seed)) for name in families}
    packed = {name for name in families if (out / f"{name}.jsonl.gz").exists()}
    measured = {name: wanted[name] if name in packed else count_rows(out / f"{name}.jsonl") for name in families}
    complete = all(measured[name] >= wanted[name] for name in families)
    if path is not None:
        rows = {name: {"measured": measured[name], "draws": wanted[name]} for name in families}
        value = {"kind": "calibrate", "out": os.fspath(out), "complete": complete, "families": rows}
        data = json.dumps(value, indent=2) + "\n"
        if path == "-":
            print(data, end="")
            return
        write_whole(path, data.encode())
    next_step = f"see presage pack {out}" if complete else "out of time: run the same command again to continue"
    print(f"{out}: {sum(measured.values()):,} of {sum(wanted.values()):,} draws measured; {next_step}")


if __name__ == "__main__":
    try:
        main()
    except PresageError as error:
        print(f"presage: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
