"""Small files by the names that the docs use for files of their readers'."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

from made_up_ops import made_up_job
from synthetic import Tracer

ROOT = Path(__file__).resolve().parent.parent
LINE = " iteration {:8d}/  500 | consumed samples: 1 | elapsed time per iteration (ms): {:.1f} | loss 1\n"
JOB = """
[model]
hidden = 1024
layers = 4
heads = 16
vocab = 32000

[training]
sequence = 2048

[parallel]
gpus = 8

[cluster]
platform = "dgx-h100"
"""


def put(folder: Path, text: str) -> Path:
    """Those files in the folder that the text names."""
    for name, write in FILES.items():
        if f'"{name}' in text:
            write(folder / name)
    return folder


def _train(path: Path) -> None:
    code = (ROOT / "examples" / "gpt.py").read_text()
    small = code.replace("sequence=1024, width=1024", "sequence=64, width=64").replace(", fused=True", "")
    path.write_text(small.replace("layers=12, vocab=50304", "layers=1, vocab=512"))


def _job(path: Path) -> None:
    path.write_text(JOB)


def _noise(path: Path) -> None:
    from shown import run

    run(f"presage fit {ROOT}/examples/gpus.csv --gpu h100_sxm --gpus 64 --out {path}", path.parent)


def _rank(path: Path) -> None:
    tracer = Tracer(int(path.name[5]), 2)
    for step in range(2):
        at = 1000.0 * step
        tracer.step(step, at, 900)
        tracer.op("aten::mm", at + 100, 60)
        tracer.launch("gemm", at + 120, at + 150, 500)
    tracer.write(path)


def _log(path: Path) -> None:
    times = (2000 + 3 * (7 * k % 11) + (400 if k == 60 else 0) for k in range(1, 120))
    path.write_text("".join(LINE.format(k, t) for k, t in enumerate(times, 1)))


def _table(path: Path) -> None:
    plain = made_up_job(path.with_suffix(""), steps=4, spread=0.1, microbatches=(4, 4))
    path.write_bytes(gzip.compress(plain.read_bytes()))


def _pack(path: Path) -> None:
    path.mkdir()
    pack = ROOT / "data" / "h200_pack"
    shutil.copy(pack / "header.json", path)
    with gzip.open(pack / "gemm.jsonl.gz", "rt") as rows:
        (path / "gemm.jsonl").write_text("".join(next(rows) for _ in range(3)))


FILES: dict[str, Callable[[Path], None]] = {
    "train.py": _train,
    "job.toml": _job,
    "noise.toml": _noise,
    "rank_0.json.gz": _rank,
    "rank_1.json.gz": _rank,
    "run1.log": _log,
    "run2.log": _log,
    "trace-AR.csv.gz": _table,
    "h200_pack": _pack,
}
