"""One spoiled file, read: what came of it, how long it took, and whether it kept to the contract.

A reader gives a value or one sentence (PresageError) that says which file is meant. Nothing else: no other exception,
no file written, no long wait. Where it gives a value, the command that takes such a file ends in a result or a
sentence too.
"""

from __future__ import annotations

import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz.mutate import spoiled
from fuzz.readers import Files, Reader
from presage.errors import PresageError

LONGEST = 5.0  # seconds for a file of a few kB, machines being busy at times


@dataclass(frozen=True)
class Outcome:
    """`crash` is what broke the contract, and nothing where it was kept."""

    accepted: bool
    seconds: float
    crash: str = ""
    said: str = ""


def inputs(reader: Reader, seed: int, first: int = 0) -> Iterator[tuple[int, Files]]:
    """The files of a reader, each time with one of them spoiled; the first ones are sound."""
    i = first
    while True:
        rng = Random(f"{reader.name} {seed} {i}")
        files = dict(rng.choice(reader.files))
        if i >= len(reader.files):
            name = rng.choice(sorted(reader.spoil))
            files[name] = spoiled(reader.spoil[name], files[name], rng)
        else:
            files = dict(reader.files[i])
        yield i, files
        i += 1


def attempt(reader: Reader, files: Files, folder: Path, command: bool = False) -> Outcome:
    """Read the files in a folder of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    target = folder / reader.target if reader.target else folder
    start = time.perf_counter()
    outcome = _read(reader, target, folder, start)
    if outcome.accepted and not outcome.crash and command and reader.command:
        outcome = _commanded(reader, target, outcome)
    left = {p.name for p in folder.iterdir()} - set(files) - {"__pycache__"}
    if left and not outcome.crash:
        return Outcome(outcome.accepted, outcome.seconds, f"left files behind: {sorted(left)}")
    return outcome


def _read(reader: Reader, target: Path, folder: Path, start: float) -> Outcome:
    accepted, crash, said = False, "", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(target)
        accepted = True
    except PresageError as e:
        said = str(e)
        if "\n" in said or len(said) > 2000 or not (str(folder) in said or target.stem in said):
            crash = f"not one sentence that names the file: {said[:300]!r}"
    except MemoryError:
        crash = "MemoryError"
    except Exception:
        crash = traceback.format_exc()
    seconds = time.perf_counter() - start
    if seconds > LONGEST and not crash:
        crash = f"took {seconds:.1f} s"
    return Outcome(accepted, seconds, crash, said)


def _commanded(reader: Reader, target: Path, outcome: Outcome) -> Outcome:
    """The command's end: a result, or a sentence; SystemExit is how it ends, with a code."""
    from typer.testing import CliRunner

    from presage.cli.app import app

    args = [a.replace("{}", str(target)) for a in reader.command]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CliRunner().invoke(app, args)
    e = found.exception
    if e is None or isinstance(e, PresageError | SystemExit):
        return outcome
    text = "".join(traceback.format_exception(e))
    return Outcome(True, outcome.seconds, f"presage {' '.join(args)}\n{text}")


def peak_memory() -> int:
    """Bytes this process has held at most (`ru_maxrss` also knows what its parent held)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
