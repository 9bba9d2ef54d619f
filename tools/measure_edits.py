"""Measure on a GPU what changes of a training step are worth (workloads/edited.py): both steps of a pair, turn by turn.

    python tools/measure_edits.py OUT.json [--shared WORKLOADS.py] [--only REGEX] [--kernels OUT2.json] [--seconds 480]

Needs Python, torch and numpy. Resumes: pairs that OUT.json has are not measured again. Of each side: the step's median,
least and most over blocks, seconds in which the GPU is at work (profiled steps), kernels a step, peak memory; of the
pair the median ratio of blocks measured one after the other. With --kernels, also each side's kernels: name, count,
microseconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "workloads"))
import edited  # noqa: E402
import varied  # noqa: E402

ROUNDS, BLOCK, WARM = 9, 0.25, 12
PLAIN = varied.stepper


def graphed(step):
    """All of a step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def one(_kept=step):  # its tensors are the graph's
        graph.replay()

    return one


def compiled_stepper(model, loss_of, *args, **kw):
    return PLAIN(model, torch.compile(loss_of), *args, **kw)


def made(side):
    """A step in its ways."""
    ways = side[2]
    varied.stepper = compiled_stepper if "compile" in ways else PLAIN
    step = edited.built("cuda", side)
    varied.stepper = PLAIN
    return flagged(graphed(step) if "graph" in ways else step)


def flagged(step):
    """With the flags it was built under: they are the whole process's."""
    tf32 = torch.backends.cuda.matmul.allow_tf32

    def one():
        if torch.backends.cuda.matmul.allow_tf32 != tf32:
            varied.flags(tf32)
        step()

    return one


def block(step, count):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def active(step, count=4):
    """Seconds a step in which some kernel or copy runs, and how many there are."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    at_work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in at_work)
    total, end = 0.0, 0.0
    for begin, stop in spans:
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    table = {}
    for e in at_work:
        row = table.setdefault(e["name"][:160], [0, 0.0])
        row[0], row[1] = row[0] + 1 / count, row[1] + e["dur"] / count
    return total / count * 1e-6, len(spans) / count, {k: [round(n, 2), round(us, 2)] for k, (n, us) in table.items()}


def measure(sides):
    """Both steps, turn by turn."""
    steps, peaks = [], []
    for side in sides:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = made(side)
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        steps.append(step)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    counts = [max(3, int(BLOCK / max(1e-5, block(s, 5)))) for s in steps]
    times = [[], []]
    for _ in range(ROUNDS):
        for k, step in enumerate(steps):
            times[k].append(block(step, counts[k]))
    out, tables = [], []
    for k, step in enumerate(steps):
        busy, kernels, table = active(step)
        tables.append(table)
        ordered = sorted(times[k])
        out.append({
            "step_ms": statistics.median(ordered) * 1e3, "p10_ms": ordered[0] * 1e3, "p90_ms": ordered[-1] * 1e3,
            "gpu_active_ms": busy * 1e3, "kernels": kernels, "peak_bytes": peaks[k], "steps": counts[k] * ROUNDS,
        })  # fmt: skip
    return out, statistics.median(a / b for a, b in zip(*times, strict=True)), tables


def pairs(shared):
    yield from edited.PAIRS.items()
    if shared:
        yield from shared_pairs(shared)


AMP, BF16, LAST = {"amp": "bfloat16"}, {"dtype": "bfloat16", "amp": None}, {"channels_last": True}
GRAPHED, PLAIN_WAY = ("graph",), ()
# Changes of known steps: case, edit, what is wrapped around its builder, ways, arguments.
KNOWN = (
    ("gpt_350m_b1_s256_amp", "cuda_graph", "capturable", GRAPHED, {}),
    ("gpt_350m_b1_s256_amp", "bf16", "", PLAIN_WAY, BF16),
    ("gpt_350m_b1_s256_amp", "checkpoint", "", PLAIN_WAY, {"ckpt": True}),
    ("gpt_350m_b1_s256_amp", "compile", "compiled", PLAIN_WAY, {}),
    ("dlrm_mlperf_b2048", "cuda_graph", "capturable", GRAPHED, {}),
    ("dlrm_mlperf_b2048", "fused_adam", "fused", PLAIN_WAY, {}),
    ("dlrm_mlperf_b2048", "tf32", "with_tf32", PLAIN_WAY, {}),
    ("dlrm_mlperf_b2048", "autocast", "", PLAIN_WAY, AMP),
    ("dlrm_mlperf_b2048", "compile", "compiled", PLAIN_WAY, {}),
    ("dlrm_mlperf_b2048", "table_batched", "joined", PLAIN_WAY, {}),
    ("dlrm_mlperf_b2048", "table_batched,cuda_graph", "joined", GRAPHED, {}),
    ("resnet50_b32_fp32", "autocast", "", PLAIN_WAY, AMP),
    ("resnet50_b32_fp32", "tf32", "with_tf32", PLAIN_WAY, {"tf32": True}),
    ("resnet50_b32_fp32", "channels_last", "", PLAIN_WAY, LAST),
    ("resnet50_b32_fp32", "cuda_graph", "", GRAPHED, {}),
    ("resnet50_b64_amp_cl", "cuda_graph", "", GRAPHED, {}),
    ("resnet50_b64_amp_cl", "fused_adam", "fused", PLAIN_WAY, {}),
    ("vgg16_b32_tf32", "autocast", "", PLAIN_WAY, AMP),
    ("vgg16_b32_tf32", "channels_last", "", PLAIN_WAY, LAST),
    ("mobilenet_b128_fp32", "channels_last", "", PLAIN_WAY, LAST),
    ("mobilenet_b128_fp32", "autocast", "", PLAIN_WAY, AMP),
    ("convnext_t_b64_amp", "channels_last", "", PLAIN_WAY, LAST),
    ("convnext_t_b64_amp", "cuda_graph", "capturable", GRAPHED, {}),
    ("bert_base_b16_s128_fp32", "autocast", "", PLAIN_WAY, AMP),
    ("bert_base_b16_s128_fp32", "tf32", "", PLAIN_WAY, {"tf32": True}),
    ("bert_base_b16_s128_fp32", "cuda_graph", "capturable", GRAPHED, {}),
    ("bert_base_b32_s512_amp", "cuda_graph", "capturable", GRAPHED, {}),
    ("bert_base_b32_s512_amp", "bf16", "", PLAIN_WAY, BF16),
    ("gpt2_small_b8_s1024_amp", "cuda_graph", "capturable", GRAPHED, {}),
    ("gpt2_medium_b8_s1024_tf32", "fused_adam", "fused", PLAIN_WAY, {}),
    ("gpt2_medium_b8_s1024_tf32", "autocast", "", PLAIN_WAY, AMP),
    ("llama1b_b1_s2048_amp", "bf16", "", PLAIN_WAY, BF16),
    ("vit_b_b64_amp", "cuda_graph", "capturable", GRAPHED, {}),
    ("gpt_1.3b_b4_s2048_amp", "checkpoint", "", PLAIN_WAY, {"ckpt": True}),
    ("gpt_1.3b_b4_s2048_amp", "bf16", "", PLAIN_WAY, BF16),
    ("dlrm_default_b2048", "table_batched", "joined", PLAIN_WAY, {}),
    ("dlrm_default_b2048", "cuda_graph", "", GRAPHED, {}),
    ("dlrm_ddp_b4096_l64_zipf", "table_batched", "joined", PLAIN_WAY, {}),
    ("dlrm_mlperf_b8192", "table_batched", "joined", PLAIN_WAY, {}),
    ("deepfm_b4096", "fused_adam", "fused", PLAIN_WAY, {}),
    ("deepfm_b4096", "cuda_graph", "capturable", GRAPHED, {}),
    ("resnet50_b256_amp_cl", "compile", "compiled", PLAIN_WAY, {}),
    ("vit_b_b64_amp", "compile", "compiled", PLAIN_WAY, {}),
    ("gpt_1.3b_b4_s2048_amp", "compile", "compiled", PLAIN_WAY, {}),
    ("bert_base_b32_s512_amp", "compile", "compiled", PLAIN_WAY, {}),
    ("convnext_t_b64_amp", "compile", "compiled", PLAIN_WAY, {}),
    ("dlrm_ddp_b4096_l64_zipf", "compile", "compiled", PLAIN_WAY, {}),
)


def shared_pairs(path):
    """Changes of known steps."""
    spec = importlib.util.spec_from_file_location("known", path)
    known = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(known)
    wraps = {
        "": lambda build: build, "capturable": capturable, "fused": fused, "with_tf32": with_tf32,
        "compiled": lambda build: compiled(known, build), "joined": lambda build: joined(known, build),
    }  # fmt: skip
    for case, edit, wrapped, ways, changes in KNOWN:
        builder, arguments = known.CASES[case]
        name = edit.replace("table_batched", "joined_tables").replace(",", "+")
        yield f"{name}/{case}", (edit, (builder, arguments, ()), (wraps[wrapped](builder), arguments | changes, ways))


def compiled(known, build):
    """With the loss compiled."""

    def one(device, **arguments):
        kept = known.train_step
        known.train_step = lambda model, opt, loss, *a, **kw: kept(model, opt, torch.compile(loss), *a, **kw)
        try:
            return build(device, **arguments)
        finally:
            known.train_step = kept

    return one


def patched(build, **more):
    """With optimizers made otherwise."""

    def one(device, **arguments):
        kept = {}
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            kept[kind] = kind.__init__

            def init(self, params, *a, _kind=kind, **kw):
                adam = _kind in (torch.optim.Adam, torch.optim.AdamW)
                allowed = {k: v for k, v in more.items() if k != "capturable" or adam}
                kw = {k: v for k, v in kw.items() if not ("fused" in allowed and k == "foreach")} | allowed
                kept[_kind](self, params, *a, **kw)

            kind.__init__ = init
        try:
            return build(device, **arguments)
        finally:
            for kind, init in kept.items():
                kind.__init__ = init

    return one


def capturable(build):
    return patched(build, capturable=True)


def fused(build):
    return patched(build, fused=True)


def with_tf32(build):
    def one(device, **arguments):
        step = build(device, **arguments)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        return step

    return one


def joined(known, build):
    """All tables of the known model looked up at once."""

    class Joined(known.DLRM):
        def __init__(self, dense, bot, tables, dim, top, sparse, device):
            super().__init__(dense, bot, [1] * len(tables), dim, top, sparse, device)
            one = torch.nn.EmbeddingBag(sum(tables), dim, mode="sum", sparse=sparse, device=device)
            self.embs = torch.nn.ModuleList([one])
            self.first = torch.tensor([0, *tables[:-1]], device=device).cumsum(0)
            self.sizes = len(tables)

        def forward(self, x, idx, off):
            d = self.bot(x)
            index = torch.cat([i + f for i, f in zip(idx, self.first, strict=True)])
            if not hasattr(self, "ends"):  # the same in every step
                self.ends = torch.tensor([0, *[len(i) for i in idx[:-1]]], device=index.device).cumsum(0)
            offsets = torch.cat([o + e for o, e in zip(off, self.ends, strict=True)])
            e = self.embs[0](index, offsets).view(self.sizes, len(x), -1).transpose(0, 1)
            t = torch.cat([d[:, None], e], 1)
            z = torch.bmm(t, t.transpose(1, 2))[:, self.tri[0], self.tri[1]]
            return self.top(torch.cat([d, z], dim=1)).squeeze(1)

    def one(device, **arguments):
        kept, known.DLRM = known.DLRM, Joined
        try:
            return build(device, **arguments)
        finally:
            known.DLRM = kept

    return one


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--shared", type=Path)
    p.add_argument("--only", default="")
    p.add_argument("--kernels", type=Path)
    p.add_argument("--seconds", type=float, default=480.0)
    args = p.parse_args()
    begun, found = time.time(), json.loads(args.out.read_text()) if args.out.exists() else {}
    kernels = {}
    for name, (edit, *sides) in pairs(args.shared):
        if name in found or time.time() - begun > args.seconds or not re.search(args.only, name):
            continue
        varied.flags()
        try:
            (base, changed), ratio, kernels[name] = measure(sides)
            found[name] = {"edit": edit, "base": base, "changed": changed, "speedup": ratio}
            print(f"{name}: {base['step_ms']:.3f} -> {changed['step_ms']:.3f} ms ({ratio:.3f}x)", flush=True)
        except Exception as e:  # a pair that cannot be run is told, not lost
            found[name] = {"edit": edit, "failed": f"{type(e).__name__}: {str(e)[:300]}"}
            print(f"{name}: {found[name]['failed']}", flush=True)
        torch.cuda.synchronize()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.out.write_text(json.dumps(found | {"_about": about}, indent=1))
        if args.kernels:
            args.kernels.write_text(json.dumps(kernels))
    print("done", len(found))


if __name__ == "__main__":
    main()
