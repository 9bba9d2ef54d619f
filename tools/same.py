"""Compare what presage answers now with what it answered when the answers were recorded (`make same`).

    python tools/same.py check  [NAME...] [--data ../shared] [--all]
    python tools/same.py record [NAME...] [--data ../shared] [--all]

Each case is a seeded command whose `--json` is compared with the recorded one: numbers must be equal, bytes are equal
where the wording did not change either; texts that changed are counted. `accuracy` cases also compare the rows of
`--out` (by hash). Cases that need the measured data are skipped where it is absent, slow ones run with `--all`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "same"
GPT = "examples/gpt.py:build"
BIG, OWN, MOE = "examples/jobs/llama3.1-405b.toml", "examples/jobs/own_model.toml", "examples/jobs/deepseek-v3.toml"

COMMANDS: dict[str, str] = {
    "gpus": "gpus",
    "platforms": "platforms",
    "graph": f"graph {GPT} --arg batch=1 --arg layers=2",
    "predict_gpt": f"predict {GPT} --arg batch=8",
    "predict_host_bound": f"predict {GPT} --arg batch=1 --arg layers=2 --draws 50",
    "predict_a100": f"predict {GPT} --arg batch=4 --gpu a100_80gb",
    "predict_rtx4090": f"predict {GPT} --arg batch=8 --gpu rtx4090",
    "predict_b200": f"predict {GPT} --arg batch=4 --gpu b200",
    "ranks_ddp": f"predict {GPT} --arg batch=2 --arg layers=4 --ranks 8 --strategy ddp",
    "ranks_fsdp": f"predict {GPT} --arg batch=2 --arg layers=4 --ranks 8 --strategy fsdp --platform dgx-h100",
    "ranks_tensor": f"predict {GPT} --arg batch=2 --arg layers=4 --ranks 8 --strategy ddp --tensor 2",
    "whatif_list": "whatif --list",
    "whatif_graphs": f"whatif {GPT} --arg batch=1 --arg layers=4 --apply cuda_graph",
    "whatif_bf16": f"whatif {GPT} --arg batch=1 --arg layers=4 --apply bf16",
    "whatif_autocast": "whatif tests/edited_models.py:pictures --apply autocast",
    "whatif_checkpoint": f"whatif {GPT} --arg batch=4 --arg layers=4 --apply checkpoint=blocks",
    "whatif_compile": f"whatif {GPT} --arg batch=2 --arg layers=4 --apply compile",
    "whatif_batch": f"whatif {GPT} --arg batch=2 --arg layers=4 --apply batch=4",
    "whatif_suggest": f"whatif {GPT} --arg batch=1 --arg layers=2 --suggest",
    "trace": "trace demo",
    "replay": "replay demo",
    "replay_scaled": "replay demo --scale kernel=gemm:0.5 --remove call=cudaLaunchKernel",
    "replay_applied": "replay demo --apply cuda_graph,faster=gemm:2",
    "job": f"job {BIG} --tokens 15T --price 2.5",
    "job_draws": f"job {BIG} --draws 2000",
    "job_experts": f"job {MOE} --draws 500 --expert-skew 0.3",
    "job_own": f"job {OWN}",
    "job_set": f"job {BIG} --gpus 4096 --set parallel.pp=8 --set training.recompute=full",
    "job_megatron": "job examples/jobs/megatron.toml",
    "job_titan": "job examples/jobs/torchtitan.toml",
    "job_hugging_face": "job examples/jobs/hugging_face.toml",
    "job_meta": "job examples/jobs/llama3-405b-meta.toml",
    "plan": f"plan {OWN} --gpus 16 --limit 30",
    "plan_big": f"plan {BIG} --gpus 16384 --keep tp=8,cp=2",
    "plan_p95": f"plan {OWN} --gpus 16 --objective p95",
    "run": f"run {BIG} --tokens 15T --deadline 60d --price 2.5 --draws 500",
    "run_own": f"run {OWN} --tokens 1B --draws 200",
    "sensitivity": f"sensitivity {OWN} --draws 800",
    "place": f"place {OWN} --draws 120 --randoms 3 --evict 0",
    "study_scale": f"study scale {BIG} --draws 500",
    "study_compute": f"study compute {BIG} --draws 500",
    "study_domain": f"study domain {OWN} --draws 200",
    "study_power": f"study power {BIG}",
    "shard": "shard demo --ranks 4 --seconds 0",
    "dlrm": "dlrm examples/dlrm/criteo.toml --plan size_lookup_greedy --draws 50",
    "dlrm_mlperf": "dlrm examples/dlrm/mlperf_dcnv2.toml --plan size_lookup_greedy --draws 20",
    "fit_steps": "fit {TMP}/steps.csv --out {TMP}/noise.toml",
    "fit_fleet": "fit examples/gpus.csv --out {TMP}/noise.toml",
    "indices": "indices {TMP}/bags.npy",
    "pack": "pack data/h200_pack",
}
CLAIMS: dict[str, str] = {
    "accuracy_collectives": "collectives {DATA}/runs/nccl_busbw.csv",
    "accuracy_embeddings": "embeddings {DATA}/h200/tbe_groups.json",
    "accuracy_sharding": "sharding {DATA}/h200/tbe_sharding.json",
    "accuracy_runs": "runs {DATA}/runs/public_runs.csv",
    "accuracy_dlrm": "dlrm {DATA}/runs/public_runs.csv",
    "accuracy_steps": "steps {DATA}/steps/mlperf_v5.0.json.gz",
    "accuracy_temporal": "temporal {DATA}/h200/temporal.json.gz",
    "accuracy_pack": "kernels data/h200_pack",
}
SLOW: dict[str, str] = {
    "accuracy_fleet": "fleet {DATA}/variability/32gpu-variability.csv {DATA}/variability/bert-longhorn-agg.csv",
    "accuracy_stragglers": "stragglers {DATA}/traces/bytedance_straggler",
    "accuracy_traces": "traces {DATA}/traces {DATA}/h200/traces",
    "accuracy_capture": "capture {DATA}/h200/workloads.py {DATA}/h200/traces",
    "accuracy_workloads": "workloads {DATA}/h200/workloads.py {DATA}/h200/measured.json",
    "accuracy_labels": "labels {DATA}/kernels/neusight",
    "accuracy_tables": "kernels {DATA}/kernels/aiconfigurator",
    "accuracy_ranks": "ranks workloads/public.py {DATA}/runs/public_runs.csv",
    "accuracy_whatif": "whatif workloads/edited.py {DATA}/h200/workloads.py data/h200_edits",
}


def _inputs(folder: Path) -> None:
    """Write the small inputs that some commands read."""
    import numpy as np

    rows = "".join(f"{i},{1 + (i * i % 17) / 1000}\n" for i in range(400))
    (folder / "steps.csv").write_text("step,seconds\n" + rows)
    np.save(folder / "bags.npy", np.arange(400).reshape(100, 4) % 17)


def answer(name: str, data: str) -> dict[str, Any]:
    """The JSON of one case, and the hash of its rows where it writes some."""
    from presage.cli.app import app

    os.chdir(ROOT)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        _inputs(Path(folder))
        line = COMMANDS.get(name) or "accuracy " + {**CLAIMS, **SLOW}[name] + " --out {TMP}/rows.csv"
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            app([*line.format(TMP=folder, DATA=data).split(), "--json", "-"], standalone_mode=False)
        printed.flush()
        text = printed.buffer.getvalue().decode().replace(folder, "TMP")
        rows = Path(folder) / "rows.csv"
        digest = hashlib.sha256(rows.read_bytes()).hexdigest() if rows.exists() else None
    return {"json": json.loads(text), "rows": digest, "cpu": round(time.process_time() - started, 1)}


def _tried(task: tuple[str, str]) -> tuple[str, dict[str, Any] | str]:
    try:
        return task[0], answer(*task)
    except BaseException as error:  # reported as this case's failure; SystemExit is one too
        import traceback

        return task[0], f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str, Any, Any]]:
    """Each place where two JSON values differ: (path, "number" | "text" | "shape", old, new)."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in old or key not in new:
                yield f"{path}.{key}", "shape", old.get(key, "(absent)"), new.get(key, "(absent)")
            else:
                yield from differences(old[key], new[key], f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield path, "shape", f"{len(old)} items", f"{len(new)} items"
        for i, (a, b) in enumerate(zip(old, new, strict=False)):
            yield from differences(a, b, f"{path}[{i}]")
    elif old != new:
        yield path, "text" if isinstance(old, str) and isinstance(new, str) else "number", old, new


def _path(name: str) -> Path:
    return RECORDED / f"{name}.json.gz"


def _compare(name: str, new: dict[str, Any], show: int) -> bool:
    """Print how an answer differs from the recorded one; True where its numbers are equal."""
    if not _path(name).exists():
        print(f"{name:24} not recorded")
        return False
    old = json.loads(gzip.decompress(_path(name).read_bytes()))
    found = list(differences(old["json"], new["json"]))
    texts = [d for d in found if d[1] == "text"]
    others = [d for d in found if d[1] != "text"]
    rows = "" if old["rows"] == new["rows"] else ", rows differ"
    verdict = "equal" if not found else f"numbers equal, {len(texts)} texts differ"
    print(f"{name:24} {verdict if not others else f'{len(others)} NUMBERS DIFFER'}{rows}  ({new['cpu']} s)")
    for path, kind, a, b in [*others, *(texts if show > 5 else [])][:show]:
        print(f"    {kind} {path}: {a!r} -> {b!r}"[:300])
    return not others and not rows


def _wanted(args: argparse.Namespace) -> list[str]:
    claims = {**CLAIMS, **(SLOW if args.all or args.names else {})}
    data = claims if Path(args.data).is_dir() else {}
    if not data:
        print(f"{len(claims)} accuracy cases skipped: no measured data at {args.data}")
    return args.names or [*COMMANDS, *data]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("record", "check"))
    parser.add_argument("names", nargs="*", help="cases (default: all quick ones)")
    parser.add_argument("--data", default=os.environ.get("PRESAGE_DATA", str(ROOT / "../shared")))
    parser.add_argument("--all", action="store_true", help="slow accuracy cases too")
    parser.add_argument("--show", type=int, default=5, help="differences printed per case; above 5 texts too")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    RECORDED.mkdir(exist_ok=True)
    good = True
    names = _wanted(args)
    with ProcessPoolExecutor(min(args.workers, len(names))) as pool:
        for name, new in pool.map(_tried, [(n, args.data) for n in names]):
            if isinstance(new, str):
                print(f"{name:24} FAILED {new}")
                good = False
            elif args.mode == "record":
                _path(name).write_bytes(gzip.compress(json.dumps(new).encode(), mtime=0))
                print(f"{name:24} recorded ({new['cpu']} s)", flush=True)
            else:
                good = _compare(name, new, args.show) and good
            sys.stdout.flush()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
