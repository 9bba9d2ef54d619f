"""Every reader of a file that a user can hand to presage, with sound files to spoil and a command that takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fuzz import seeds
from fuzz.seeds import EXAMPLES, as_json, packed, shipped

Read = Callable[[Path], Any]
Files = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """`files` are sound; `spoil` names those of them to be spoiled, with their kind (see `mutate`).

    `target` is what is handed over, a file of them or "" for their folder. `command` is what a user would type,
    {} being the target; it is run for some of the files that are read.
    """

    name: str
    read: Read
    files: tuple[Files, ...]
    spoil: dict[str, str]
    target: str = ""
    command: tuple[str, ...] = ()
    slow: bool = False  # the command takes more than a tenth of a second


def alone(
    name: str, read: Read, file: str, kind: str, *sound: bytes, command: tuple[str, ...] = (), slow: bool = False
) -> Reader:
    """A reader of a single file."""
    return Reader(name, read, tuple({file: data} for data in sound), {file: kind}, file, command, slow)


def of(place: str) -> Read:
    """A function by its module and name, imported when it is first needed."""
    module, _, name = place.partition(":")
    return lambda path: getattr(import_module(module), name)(path)


# ---- what is done with what was read, where that is cheap and could break


def _replayed(path: Path) -> Any:
    from presage.traces.replay import replay_of
    from presage.traces.trace_set import files_of, read_runs

    runs = read_runs(files_of([path]))
    timelines = [replay_of(run).simulate() for run in runs]
    assert all((t.wait >= 0).all() for t in timelines)
    return timelines


def _ordered(read: Callable[[Path], Any], path: Path) -> Any:
    from presage.traces.execution_graph import producers, topological_order

    graph = read(path)
    assert topological_order(graph) == tuple(n.id for n in graph.nodes)
    assert set(producers(graph, "storage")) == {n.id for n in graph.nodes if not n.on_gpu}
    return graph


def _et(path: Path) -> Any:
    from presage.traces.execution_trace import read_et

    return _ordered(read_et, path)


def _chakra(path: Path) -> Any:
    from presage.traces.chakra import read_chakra

    return _ordered(read_chakra, path)


def _models(path: Path) -> Any:
    from presage.costs.kernel_files import load_file

    return load_file.__wrapped__(path)


def _noise(path: Path) -> Any:
    from presage.noise.files import format_noise, read_noise

    return format_noise(read_noise(path))


def _logs(path: Path) -> Any:
    from presage_fit.step_logs import read_logs

    return read_logs([path]).groups()


def _fleet(path: Path) -> Any:
    from presage_fit.fleet import fit_fleet
    from presage_fit.fleet_files import read_fleet

    return fit_fleet(read_fleet(path))


def _plan(path: Path) -> Any:
    from presage.embeddings.table_files import read_plan, tables_of

    return read_plan(path, tables_of(seeds.TABLES["tables"], path))  # type: ignore[arg-type]


def _pairs(path: Path) -> Any:
    from presage_validation.whatif import measured_pairs

    return measured_pairs([path])


def _temporal(path: Path) -> Any:
    from presage_validation.temporal import score_temporal

    return score_temporal(path, lambda _: None)


def _published(path: Path) -> Any:
    from presage_validation.straggler_cost import PublishedResult, published

    return published(path.with_name("trace-A.csv"), "nd", PublishedResult)


def _code(path: Path) -> Any:
    from presage.usercode import load, load_cases

    load(f"{path}:build")
    return load_cases(path)


def _in(path: Path) -> Any:
    from presage.embeddings.dlrm_job import read_any_job

    return read_any_job(path / "job.toml")


# ---- the list

EXAMPLE = EXAMPLES / "jobs"
MEGATRON = {"job.toml": b'arguments = "run.sh"\n\n[cluster]\nplatform = "dgx-a100"\n', "run.sh": seeds.SCRIPT}
TITAN = {
    "job.toml": b'titan = "t.toml"\n\n[parallel]\ngpus = 256\n\n[cluster]\nplatform = "dgx-h100"\n',
    "t.toml": (EXAMPLE / "torchtitan" / "llama3_70b.toml").read_bytes(),
}
HUGGING = {
    "job.toml": (EXAMPLE / "hugging_face.toml").read_bytes().replace(b"mixtral/", b""),
    "config.json": (EXAMPLE / "mixtral" / "config.json").read_bytes(),
}
DLRM = {
    "job.toml": (EXAMPLES / "dlrm" / "criteo.toml").read_bytes().replace(b"criteo_tables", b"tables"),
    "tables.json": as_json(seeds.TABLES),
}
JOBS = tuple({"job.toml": (EXAMPLE / f"{n}.toml").read_bytes()} for n in ("own_model", "llama3.1-405b", "deepseek-v3"))
JOB = ("job", "{}/job.toml")
PACK = {"header.json": as_json(seeds.PACK), "gemm.jsonl": seeds.pack_rows(), "host.json": b'{"launch_us": 3.5}'}
RANKS = {"0.json": seeds.kineto(0, 2), "1.json.gz": packed(seeds.kineto(1, 2))}
STAGES = {"config.json": b'{"pp_size": 2, "num_mbs": 2}'} | {f"pp_rank_{k}.json": seeds.pipeline(k) for k in (0, 1)}
READERS = (
    alone("Kineto trace", _replayed, "a.json", "json", seeds.kineto(), packed(seeds.kineto()), command=("trace", "{}")),
    Reader("folder of traces", _replayed, (RANKS,), {"0.json": "json", "1.json.gz": "json"}, command=("replay", "{}")),
    alone("PyTorch execution trace", _et, "a.json", "json", *map(as_json, seeds.ETS), command=("trace", "{}")),
    alone("Chakra graph", _chakra, "a.et", "binary", seeds.chakra_file(), command=("trace", "{}")),
    alone("Chakra graph in JSON", _chakra, "a.json", "json", as_json(seeds.FEEDER), command=("trace", "{}")),
    alone(
        "table of operations",
        of("presage_fit.optable:read"),
        "a.csv",
        "csv",
        seeds.operations(),
        packed(seeds.operations()),
        command=("fit", "{}"),
    ),
    Reader(
        "pipeline run",
        of("presage_validation.pipeline:read"),
        (STAGES,),
        dict.fromkeys(STAGES, "json"),
        command=("accuracy", "traces", "{}"),
    ),
    Reader(
        "calibration pack",
        of("presage_fit.pack:read"),
        (PACK,),
        {"header.json": "json", "gemm.jsonl": "jsonl", "host.json": "json"},
        command=("pack", "{}"),
    ),
    alone("fitted kernel models", _models, "kernels.npz", "npz", seeds.models()),
    Reader("job", _in, JOBS, {"job.toml": "toml"}, command=JOB, slow=True),
    Reader("Megatron-LM script", _in, (MEGATRON,), {"run.sh": "text"}, command=JOB, slow=True),
    Reader("TorchTitan file", _in, (TITAN,), {"t.toml": "toml"}, command=JOB, slow=True),
    Reader("Hugging Face config", _in, (HUGGING,), {"config.json": "json"}, command=JOB, slow=True),
    Reader("recommendation job", _in, (DLRM,), {"job.toml": "toml", "tables.json": "json"}),
    alone("noise", _noise, "noise.toml", "toml", seeds.NOISE, command=("fit", "{}")),
    alone(
        "GPU",
        of("presage.hardware.gpu:read_gpu"),
        "mine.toml",
        "toml",
        *shipped("hardware/gpus/h200.toml"),
        command=("gpus", "{}"),
    ),
    alone(
        "host", of("presage.hardware.host:read_host"), "mine.toml", "toml", *shipped("hardware/hosts/h200_host.toml")
    ),
    alone(
        "platform",
        of("presage.hardware.platform:read_platform"),
        "mine.toml",
        "toml",
        *shipped("hardware/platforms/dgx-h100.toml"),
        command=("platforms", "{}"),
    ),
    alone(
        "framework",
        of("presage.configs.frameworks:read_framework"),
        "mine.toml",
        "toml",
        *shipped("configs/frameworks/torchtitan.toml", "configs/frameworks/nemo.toml"),
    ),
    alone(
        "failure rates",
        of("presage.runs.sets:read_reliability"),
        "mine.toml",
        "toml",
        *shipped("data/runs/dgx-b200.toml", "data/runs/llama3.toml"),
    ),
    alone("host model", of("presage.costs.host_model:read"), "host.toml", "toml", *shipped("data/h200/host.toml")),
    alone(
        "document lengths",
        of("presage.configs.lengths:read_lengths"),
        "lengths.csv",
        "csv",
        seeds.LENGTHS,
        b"100\n200\n300\n",
    ),
    alone(
        "speeds of GPUs",
        of("presage.placement.fleet:read_speeds"),
        "gpus.csv",
        "csv",
        (EXAMPLES / "gpus.csv").read_bytes(),
    ),
    alone(
        "MLPerf log",
        _logs,
        "log.json",
        "json",
        seeds.mlperf(),
        packed(seeds.mlperf()),
        command=("fit", "{}"),
        slow=True,
    ),
    alone("Megatron-LM log", _logs, "log.txt", "text", seeds.megatron(), command=("fit", "{}"), slow=True),
    alone("table of steps", _logs, "steps.csv", "csv", seeds.STEPS, command=("fit", "{}"), slow=True),
    alone("fleet of GPUs", _fleet, "fleet.csv", "csv", seeds.FLEET, command=("fit", "{}")),
    alone(
        "embedding tables",
        of("presage.embeddings.table_files:read_tables"),
        "tables.json",
        "json",
        as_json(seeds.TABLES),
    ),
    alone("sharding plan", _plan, "plan.json", "json", as_json(seeds.PLAN)),
    alone("saved graph", of("presage.graph.save:read"), "a.presage", "graph", seeds.graph(), command=("graph", "{}")),
    alone(
        "indices, .npz",
        of("presage.embeddings.indices:read_indices"),
        "i.npz",
        "npz",
        *seeds.indices(),
        command=("indices", "{}"),
    ),
    alone(
        "indices, .npy",
        of("presage.embeddings.indices:read_indices"),
        "i.npy",
        "npy",
        seeds.array(),
        command=("indices", "{}"),
    ),
    alone(
        "public runs",
        of("presage_validation.public_table:read_setups"),
        "runs.csv",
        "csv",
        seeds.public_runs(),
        command=("accuracy", "runs", "{}"),
        slow=True,
    ),
    alone(
        "collectives",
        of("presage_validation.collectives:read_rows"),
        "nccl.csv",
        "csv",
        seeds.COLLECTIVES,
        command=("accuracy", "collectives", "{}"),
    ),
    alone(
        "kernel times",
        of("presage_validation.kernel_tables:read_table"),
        "k.csv",
        "csv",
        seeds.KERNELS,
        packed(seeds.KERNELS),
    ),
    alone(
        "embedding groups", of("presage_validation.embeddings:read_groups"), "g.json", "json", as_json(seeds.TBE_GROUPS)
    ),
    alone("placements", of("presage_validation.embeddings:read_tasks"), "t.json", "json", as_json(seeds.TBE_TASKS)),
    alone(
        "measured steps", of("presage_validation.workloads:measured_cases"), "m.json", "json", as_json(seeds.MEASURED)
    ),
    alone("measured pairs", _pairs, "run1.json", "json", as_json(seeds.PAIRS)),
    alone(
        "labels",
        of("presage_validation.labels:read_labels"),
        "l.json",
        "json",
        as_json({"Tesla_V100-PCIE-32GB": {"a": seeds.LABEL}}),
    ),
    alone("series of one GPU", _temporal, "t.json", "json", as_json(seeds.TEMPORAL)),
    alone("published slowdowns", _published, "nd-A.json", "json", as_json(seeds.PUBLISHED)),
    alone("prediction", of("presage.measure.prediction:read"), "p.json", "json", as_json(seeds.PREDICTED)),
    alone("user's code", _code, "code.py", "text", seeds.CODE),
)
BY_NAME = {r.name: r for r in READERS}


def with_torch() -> Reader:
    """Tensors, which are made with torch and read by it."""
    read, command = of("presage.embeddings.indices:read_indices"), ("indices", "{}")
    return alone("indices, .pt", read, "i.pt", "zip", seeds.tensors(), command=command)
