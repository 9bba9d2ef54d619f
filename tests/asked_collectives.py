"""What PyTorch asks of its process groups in a step: of real processes on gloo, and of captured ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from presage.graph.work import collective, collective_bytes

WARM_UP = 2
KINDS = {  # parts of the names of PyTorch's ops
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast",
    "c10d::reduce_": "broadcast", "send": "send_recv", "recv": "send_recv",
}  # fmt: skip


class Asked(TorchDispatchMode):
    """What PyTorch asks of its process groups: kind, ranks, bytes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        kind = next((kind for part, kind in KINDS.items() if part in name), None)
        if "c10d" in name and kind is not None and "copy_in" not in name:
            self.seen.append((kind, *self.asked(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))

    def asked(self, func, args, kwargs):
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        ranks = dist.get_process_group_ranks(group)
        if "dst" in given or "src" in given:
            pair = (dist.get_rank(), ranks[given["dst"]]) if "dst" in given else (ranks[given["src"]], dist.get_rank())
            ranks = list(pair)
        by_argument = [sum(x.nbytes for x in tree_leaves(v) if isinstance(x, torch.Tensor)) for v in given.values()]
        whole = max(by_argument)  # what is gathered, or what is there before it is scattered
        if "all_gather" in func._schema.name and "group_size" in given:
            whole *= given["group_size"]
        return ranks, whole


def told(graph):
    """What a captured rank asks for, in the same form."""
    found = [op for op in graph.ops if collective(op)]
    return [[collective(op), list(graph.groups[op.group]), collective_bytes(graph, op)] for op in found]


def in_real_processes(file, folder, ranks, timeout=100, **more):
    """Run a file's `work` in so many processes; what each wrote, by rank."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, file, str(folder)], check=True, timeout=timeout, env=environment)
    return [json.loads((folder / f"{rank}.json").read_bytes()) for rank in range(ranks)]


def record(rank, folder, ranks, cases):
    """One real rank: what each step asks for, in a steady one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    found = {}
    for name, build in cases.items():
        step = build("cpu")
        for _ in range(WARM_UP):
            step()
        with Asked() as asked:
            step()
        found[name] = asked.seen
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
