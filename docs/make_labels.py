"""Score whole float32 models on GPUs that were never calibrated, and write docs/labels.md.

python docs/make_labels.py ../shared
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from presage_validation.label_models import NETS
from presage_validation.labels import PEER, score_labels
from presage_validation.score import AccuracyResult, Score

PAGE = Path(__file__).with_name("labels.md")
SHOWN = ("train", "train_machine", "train_forward", "train_backward", "inference", "fusion")
WORST = 10

HEAD = """# Whole models on GPUs that were never calibrated

This page is written by `make accuracy`. NeuSight (ASPLOS'25, MIT) timed transformers of Hugging Face, float32 and eager
in PyTorch 2.1, on GPUs from P100 to H100 and on AMD's: one pass forward, and in training one backward.
`presage accuracy labels ../shared/kernels/neusight` predicts each from its name, batch, sequence length and layers.
"""

METHOD = """
## How, and from what

- A model is a list of the kernels it launches both ways (`label_models.py`), whose GEMMs agree with NeuSight's own
  lists of ops, op by op. A kernel's time is a law of the GPU times a correction.
- Float32 GEMMs: share of the peak by lanes and by power (`costs/vector.py`; an L4 of 72 W reaches three tenths of
  its peak), corrected by one set of trees for all GPUs but Hoppers (`costs/single.py`). Fitted on NeuSight's **train**
  tables alone (A100 40 GB, P100, T4, V100) and our H200; Ada's energy is general knowledge of an RTX 4090.
- All other kernels: our H200's, carried over by bandwidth where they are memory-bound and by SMs and clock where
  instructions do, without the help of caches that are too small (`costs/corrections.py`). AMD's GEMMs follow the law
  alone, which is nearer in NeuSight's tables of the MI210: training is nearer so, inference farther off.
- No number of a GPU is fitted on a label, on the time of an op listed with labels, or on H100, L4 and A100 80 GB at
  all. AMD's GEMMs: one share, from NeuSight's table of the MI210, for there is no train table of them.
- **But these labels are no unseen test.** Which effects are modelled was decided in about ten rounds with them in view,
  see below. Only cases that are not in the file can show how well it does.
- Labels are no sums of ops: they are times of whole passes between two CUDA events, the best five of 25, and before
  each PyTorch's cache of memory is emptied. So in training each pass forward asks the driver for all its memory again.
  A cudaMalloc takes 0.25 ms in those public traces where it is short (in others 2 to 5 ms), and that is what an H100's
  labels show; the machine of the A100 80 GB took 0.6 to 0.7 ms, which no figure of the GPU explains.
- Memory that a pass gave back is wiped by the driver before anyone gets it again, and a pass that needs more than was
  free waits for it. Both drivers' sources say so: AMD's `AMDGPU_GEM_CREATE_VRAM_WIPE_ON_RELEASE` on all memory of
  compute, NVIDIA's allocator of physical memory that waits for its scrubber (`scrubCheckAndWaitForSize`). From Hopper
  on copy engines have a way of their own to wipe (`LAUNCH_DMA_MEMORY_SCRUB_ENABLE`), which is taken to cost nothing,
  as OPT on the H100 shows. The bytes follow from the model and the GPU's memory. The rate is the one number that comes
  from labels, and never from those of the same architecture: AMD's cases are predicted with what the A100's show (38
  GB/s), the A100's with what AMD's show (32 GB/s). Without it `train` is 12.2%, 37.0% at worst.
- `train_machine` takes the time of an allocation and the rate of wiping from the other cases of the same GPU, never
  from the case that is scored; `train` is the figure to set alongside NeuSight's.
- Torch.compile (`fusion`): chains of element-wise ops are one kernel each; products stay as they are.
"""

CHOICES = """
## What was chosen with labels in view

MAPE with one choice undone at a time (measured once, on the same cases, before corrections were carried over by
evidence: these figures compare with one another, not with those above):

| | train | inference | fusion | L4: train, inference |
|---|---|---|---|---|
| all as it stood | 12.6% | 4.9% | 6.4% | 13.3%, 6.3% |
| Ada's energy is Hopper's, as it first was | 14.4% | 6.7% | 13.8% | 31.9%, 20.8% |
| GEMMs get no power that other kernels leave | 13.9% | 6.4% | 9.1% | 27.9%, 15.2% |
| dropout's backward pass is one kernel, not two | 12.7% | 4.9% | 6.4% | 11.2%, 6.3% |
| Switch: numbers read here and there cost no more | 12.6% | 5.6% | 6.4% | 13.3%, 6.3% |
| Switch: the host is never waited for | 12.8% | 5.7% | 6.4% | 13.3%, 7.9% |
| all five undone | 15.8% | 9.6% | 16.6% | 44.5%, 30.9% |
"""

SHORT = """
## What falls short, and the likely reasons

- A100 80 GB, training, small batches: memory asked for anew, see above; `train_machine` has them.
- Where training takes more than 80 to 90% of the memory (GPT-2 large with batch 4 and GPT-3 XL on MI210 and MI250,
  GPT-3 2.7B on the A100) the forward pass is 1.6 to 2.6 times as long as its kernels: it waits for memory to be wiped.
  That this is so was found with these labels in view; the rates of AMD's three cases agree within 1%, the A100's is
  20% higher.
- Switch: which rows an expert gets is asked of the GPU, so the host waits; its small ops are a rough count.
- L4 and T4, of 70 W, run faster cool than warm: tables and labels of one T4 differ by a quarter.
"""


def percent(x: float) -> str:
    return f"{100 * x:.1f}%"


def cell(s: Score | None) -> str:
    return f"{percent(s.mape)} ({s.n})" if s is not None and s.n else ""


def headline(result: AccuracyResult) -> Iterator[str]:
    yield "| | n | MAPE | median | p90 | max | bias | NeuSight's own MAPE |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in SHOWN:
        s = result.metrics()[name]
        own = percent(PEER[name.removesuffix("_machine")]) if name.removesuffix("_machine") in PEER else ""
        yield f"| {name} | {s.n} | {' | '.join(map(percent, (s.mape, s.median, s.p90, s.max, s.bias)))} | {own} |"


def groups(result: AccuracyResult, models: bool) -> Iterator[str]:
    yield f"| {'model' if models else 'GPU'} | " + " | ".join(SHOWN) + " |"
    yield "|---" * (len(SHOWN) + 1) + "|"
    for group in result.groups():
        if (group in NETS) == models:
            found = result.metrics(group)
            yield f"| {group} | " + " | ".join(cell(found.get(m)) for m in SHOWN) + " |"


def worst(result: AccuracyResult) -> Iterator[str]:
    yield "| case | GPU | predicted | measured | error |"
    yield "|---|---|---|---|---|"
    rows = [r for r in result.rows if r.metric in ("train", "inference", "fusion")]
    for r in sorted(rows, key=lambda r: -abs(r.error))[:WORST]:
        times = f"{1e3 * r.predicted:.0f} ms | {1e3 * r.measured:.0f} ms"
        yield f"| {r.name} | {r.group} | {times} | {100 * r.error:+.1f}% |"


def skipped(result: AccuracyResult) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for s in result.skipped:
        by_reason.setdefault(s.reason, []).append(s.row)
    for reason, rows in by_reason.items():
        yield f"- {len(rows)}: {reason}"


def page(result: AccuracyResult) -> str:
    beside = "NeuSight's own errors are over all cases that it published (41 of training); these are a part of them."
    parts = [
        HEAD,
        *headline(result),
        "",
        beside,
        METHOD,
        "## By GPU (MAPE, and how many)",
        "",
        *groups(result, False),
        "",
    ]
    parts += ["## By model", "", *groups(result, True), "", "## Worst cases", "", *worst(result), ""]
    parts += ["Left out:", "", *skipped(result), CHOICES, SHORT]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(score_labels(Path(sys.argv[1]) / "kernels" / "neusight")))
