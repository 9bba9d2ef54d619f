"""Run the training scripts of workloads/scripts as they are on this machine's GPU and write what their steps take.

python tools/measure_scripts.py OUT.json                     every script, each in a process of its own
python tools/measure_scripts.py OUT.json --seconds 500       no new script is begun after that time
python tools/measure_scripts.py OUT.json --resume OLD.json   those that OLD.json has are not run again
python tools/measure_scripts.py OUT.json --dry-run           on the CPU, 16 steps of a small size, with no GPU

Each is measured by `python -m presage.measure`: 10 warm-up steps, 2 profiled ones, about 2.5 s of timed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "workloads" / "scripts"
ONE = 80.0  # seconds a script may take, imports and compilation included
SHARED = 2 << 30  # bytes of shared memory that workers need to pass batches of images on; with less they load no data
IMAGES = ("imagenet_resnet.py", "vit_finetune.py", "simclr.py", "unet_segmentation.py", "dcgan.py")
GPT = (
    "--device=cpu --batch_size=1 --block_size=32 --n_layer=2 --n_embd=96 --eval_iters=1 --gradient_accumulation_steps=2"
)
CLM = "--per_device_train_batch_size {} --max_steps 20000 --dataloader_num_workers 4"
SMALL_CLM = "--use_cpu --block_size 16 --config_overrides n_embd=48,n_layer=2,n_head=2 "


class Run(NamedTuple):
    """A script with its arguments, and with those of a dry run on the CPU."""

    name: str
    file: str
    argv: str
    dry: str


RUNS = (
    Run("nanogpt", "nanogpt.py", "", GPT),
    Run(
        "nanogpt_fp16", "nanogpt.py", "--dtype=float16 --gradient_accumulation_steps=1 --batch_size=8 --dropout=0.1",
        f"{GPT} --dropout=0.1",
    ),
    Run("resnet50", "imagenet_resnet.py", "", "--device cpu -b 2 -j 1 -a resnet18"),
    Run(
        "resnet18_amp", "imagenet_resnet.py", "-a resnet18 -b 256 --amp --channels-last -j 12",
        "--device cpu -b 2 -j 1 -a resnet18 --amp --channels-last",
    ),
    Run("vit_finetune", "vit_finetune.py", "", "--device cpu --batch-size 1 --workers 1"),
    Run("mingpt", "mingpt.py", "", "--device cpu --batch-size 2"),
    Run(
        "hf_run_clm", "hf_run_clm.py", "--bf16 " + CLM.format(8),
        SMALL_CLM + CLM.format(1),
    ),
    Run("hf_run_glue", "hf_run_glue.py", "", "--use_cpu --max_seq_length 16 --per_device_train_batch_size 1"),
    Run(
        "accelerate_clm", "accelerate_clm.py", "",
        "--mixed_precision no --per_device_train_batch_size 1 --block_size 16 --hidden_size 256 --num_layers 1",
    ),
    Run("lightning_text", "lightning_text.py", "", "--accelerator cpu --batch-size 1 --layers 1 --workers 1"),
    Run("gcn", "gcn_cora.py", "", "--nodes 2708 --edges 10556"),
    Run("gat", "gcn_cora.py", "--model gat", "--model gat --nodes 2708 --edges 10556"),
    Run("graphsage", "graphsage.py", "", "--batch_size 2 --graphs 64 --hidden 16"),
    Run(
        "recipe", "recipe_finetune.py", "",
        "device=cpu model.dim=128 model.layers=1 max_seq_len=32 model.heads=4 model.kv_heads=2",
    ),
    Run("dcgan", "dcgan.py", "", "--device cpu --batchSize 2 --workers 1"),
    Run("ppo", "ppo_atari.py", "", "--num-envs 2 --num-steps 8"),
    Run("dqn", "dqn_atari.py", "", "--batch-size 4 --learning-starts 20 --buffer-size 200"),
    Run("vae", "vae.py", "", "--batch-size 8"),
    Run("mae", "mae_pretrain.py", "", "--device cpu --batch_size 1"),
    Run("dlrm", "dlrm_s.py", "--use-gpu", "--mini-batch-size 64 --arch-embedding-size 100-100"),
    Run("dlrm_sparse", "dlrm_s.py", "--use-gpu --sparse", "--sparse --mini-batch-size 64 --arch-embedding-size 9-9"),
    Run("dit", "dit_train.py", "", "--device cpu --global-batch-size 1 --depth 1"),
    Run("unet_amp", "unet_segmentation.py", "--amp", "--batch-size 1 --workers 1"),
    Run("t5", "t5_seq2seq.py", "", "--batch_size 1 --source_len 96 --target_len 8"),
    Run("lstm_lm", "word_language_model.py", "--accel --tied", "--emsize 32 --nhid 32 --tied"),
    Run("speech", "speech_train.py", "", "--device cpu --batch-size 1 --target-len 4 --layers 1"),
    Run("moe", "moe_train.py", "", "--device cpu --batch-size 1 --seq-len 32 --dim 128 --layers 1"),
    Run("simclr", "simclr.py", "--fp16-precision", "--device cpu --batch-size 2 --workers 1"),
    Run("clip", "clip_train.py", "", "--device cpu --batch-size 2"),
    Run("lora", "lora_finetune.py", "", "--device cpu --micro-batch-size 1 --cutoff-len 16 --layers 1"),
    Run("nanogpt_compiled", "nanogpt.py", "--compile=True --gradient_accumulation_steps=1", GPT),
)  # fmt: skip

# Runs a script on the CPU with the machinery that measures it, as far as that needs no GPU.
DRY = """
import sys, time
from contextlib import suppress
from presage.scripts import ScriptRun, StepWatch, TrainingScript

class Enough(BaseException):
    pass

class Listener:
    ends = []
    def mark(self): pass
    def begin(self, number): pass
    def end(self, number, parts):
        self.ends.append(time.perf_counter())
        if len(self.ends) == 16:
            raise Enough

script = TrainingScript(sys.argv[1], tuple(sys.argv[2:]))
with ScriptRun(script).prepared() as run, suppress(Enough), StepWatch(script, Listener()).following():
    run.run()
assert len(Listener.ends) == 16, f"ended after {len(Listener.ends)} steps"
"""


def main() -> None:
    args = _arguments()
    results: dict[str, Any] = {"machine": _host(), "cases": {}}
    for old in (args.resume, args.out):
        if old is not None and old.is_file():
            results["cases"] |= json.loads(old.read_text())["cases"]
    done = {name for name, case in results["cases"].items() if "step_ms" in case}
    wanted = [r for r in RUNS if r.name not in done and (not args.only or r.name in args.only)]
    if not args.dry_run:
        _read_ahead()
    start = time.time()
    for run in wanted:
        if time.time() - start > args.seconds:
            print(f"{run.name} and what follows it: no time left")
            break
        began = time.time()
        results["cases"][run.name] = case = (_dry if args.dry_run else _measured)(run)
        results["machine"] |= case.pop("machine", {})
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        said = case.get("error") or (f"{case['step_ms']:.2f} ms" if "step_ms" in case else "fine")
        print(f"{run.name}: {said} ({time.time() - began:.0f} s)", flush=True)


def _arguments() -> argparse.Namespace:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("out", type=Path)
    out.add_argument("--seconds", type=float, default=520.0)
    out.add_argument("--resume", type=Path)
    out.add_argument("--only", nargs="*")
    out.add_argument("--dry-run", action="store_true")
    return out.parse_args()


def _measured(run: Run) -> dict[str, Any]:
    argv = run.argv if run.file not in IMAGES or _shared_memory() > SHARED else f"{run.argv} --workers 0".strip()
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "measured.json")
        words = ["-m", "presage.measure", str(SCRIPTS / run.file), "--no-predict", "--json", str(to)]
        error = _ended([*words, "--limit", str(ONE - 10), "--", *shlex.split(argv)])
        found: dict[str, Any] = json.loads(to.read_text()) if to.is_file() else {}
    case = {"file": run.file, "argv": argv}
    if not found:
        return case | {"error": error or "nothing was written"}
    step, each = found["step_ms"], found["per_step_ms"]
    return case | {
        "step_ms": step["p50"], "step_ms_p5": step["p5"], "step_ms_p95": step["p95"], "steps": found["steps"],
        "issue_ms": found["issue_ms"], "gpu_active_ms": found["gpu_active_ms"], "kernels": found["kernels"],
        "peak_alloc": found["peak_memory_bytes"], "peak_reserved": found["peak_reserved_bytes"],
        "breakdown_ms": {name: round(part["ms"], 4) for name, part in found["breakdown"].items()},
        "per_step_ms": [round(ms, 3) for ms in each[:100]],
        "machine": {key: found[key] for key in ("gpu", "torch", "cuda", "cudnn")},
    }  # fmt: skip


def _dry(run: Run) -> dict[str, Any]:
    error = _ended(["-c", DRY, str(SCRIPTS / run.file), *shlex.split(run.dry)])
    return {"file": run.file, "argv": run.dry} | ({"error": error} if error else {})


def _ended(words: list[str]) -> str:
    """Runs Python in a process group of its own, workers included; what went wrong."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=said, stderr=said, env=environment, start_new_session=True
        )
        try:
            code = process.wait(ONE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = -9
        said.seek(0)
        last = said.read().strip()[-600:]
    return "" if code == 0 else f"exit code {code}: {last}"


def _read_ahead() -> None:
    """Imports the large packages once, all at a time, so that each script finds their files in memory."""
    names = ("torch", "torchvision", "torch_geometric", "pytorch_lightning", "accelerate", "transformers.trainer")
    found = [subprocess.Popen([sys.executable, "-c", f"import {name}"], stderr=subprocess.PIPE) for name in names]
    for name, process in zip(names, found, strict=True):
        _, said = process.communicate()
        if process.returncode:
            print(f"{name}: {said.decode().strip()[-200:]}", flush=True)


def _shared_memory() -> int:
    """What may be written to it, in bytes."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return room.f_frsize * room.f_bavail


def _host() -> dict[str, Any]:
    model = ""
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    host = {
        "python": platform.python_version(),
        "cpu": model,
        "cores": os.cpu_count(),
        "shared_memory": _shared_memory(),
    }
    return host | {"date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    main()
