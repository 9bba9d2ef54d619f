"""A Plan: knobs and what else a job's TOML says. Its TOML is the truth: all answers come from that text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.configs.job import Job
from presage.configs.job_file import EVEN, JobTable, ParsedJob
from presage.configs.schema import merge_sections
from presage.errors import InputError, PresageError
from presage.files.reading import parse_toml, read_text
from presage.parallel.schedules import default_schedule
from presage.prediction.jobs.job_prediction import JobResult
from presage.search.job_toml import job_toml, table_toml
from presage.search.plans import RECOMPUTES, recompute_word
from presage.ui.knobs import KEPT, KNOBS, SHARDINGS, InvalidPlan, knobs_named_in, parse_value

LONGEST = 32_768  # letters of a job's text
STAGES, LAYERS, EXPERTS, WIDE = 1024, 4096, 4096, 1 << 20  # more is no plan, and takes more memory than there is
OWN = {"sequence_parallel", "expert_tp", "shard", "layers_as", "ends_as_layers", "cp_balance", "dispatcher"}
KNOB_TRAINING = {"sequence", "micro_batch", "global_batch", "microbatches", "precision", "recompute"}  # has knobs
PLACE = "plan"


@dataclass(frozen=True)
class Plan:
    """`rest` are sections of a job's file without what knobs say, `run` what it asks of the whole run."""

    knobs: Mapping[str, Any]
    rest: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def plan_of(values: Mapping[str, Any], rest: Any = None) -> Plan:
    """From what a page says, which may be anything."""
    if rest is not None and not isinstance(rest, Mapping):
        raise InvalidPlan("the rest of the plan is not a table: reload the page")
    return Plan({k.name: parse_value(k, values.get(k.name)) for k in KNOBS}, rest or {})


# ---- a plan as its text


def text_of(plan: Plan) -> str:
    """The job file that `presage job` takes."""
    return table_toml(_spread(_table(plan)))


def _table(plan: Plan) -> dict[str, Any]:
    k, rest = plan.knobs, _still_said(plan)
    said: dict[str, Any] = {
        "name": rest.get("name") or (k["model"] if k["model"] != KEPT else "job"),
        "model": {} if k["model"] == KEPT else {"preset": k["model"]},
        "training": {name: k[name] for name in ("sequence", "micro_batch", "global_batch", "precision")},
        "parallel": _parallel(k),
        "framework": {"name": k["framework"]},
        "cluster": {} if k["platform"] == KEPT else {"platform": k["platform"]},
    }
    if k["recompute"] != KEPT:
        said["training"]["recompute"] = k["recompute"]
    if k["price"] is not None:
        said["cluster"]["price_per_gpu_hour"] = k["price"]
    order = ("name", "model", "training", "parallel", "overlap", "framework", "cluster")
    found = merge_sections(rest, said)
    return {name: found[name] for name in order if found.get(name)} | {n: v for n, v in found.items() if n not in order}


def _still_said(plan: Plan) -> dict[str, Any]:
    """The rest without the model and the cluster that were described, where others are chosen."""
    rest = dict(plan.rest)
    if plan.knobs["model"] != KEPT:
        rest.pop("model", None)
    if plan.knobs["platform"] != KEPT and "gpu" in _subtable(rest, "cluster"):
        rest.pop("cluster")
    return rest


def _parallel(k: Mapping[str, Any]) -> dict[str, Any]:
    """Chunks and schedules need stages."""
    if k["sharding"] not in SHARDINGS:
        raise InvalidPlan(f"Sharded state: choose from {', '.join(SHARDINGS)}", ("sharding",))
    zero, fsdp = SHARDINGS[k["sharding"]]
    out = {name: k[name] for name in ("gpus", "tp", "pp", "cp", "ep")}
    if k["pp"] > 1:
        out |= {"virtual": k["virtual"]} | ({"schedule": k["schedule"]} if k["schedule"] != "auto" else {})
    return out | {"zero": zero} | ({"fsdp": True} if fsdp else {})


def _spread(table: dict[str, Any]) -> dict[str, Any]:
    """Layers that do not come out even are dealt out as even as can be; degrees that this model cannot have are 1."""
    parallel = dict(table["parallel"])
    for name in ("layers_as", "ends_as_layers"):
        parallel.pop(name, None)
    if parallel["tp"] == 1:
        parallel.pop("sequence_parallel", None)
    job = job_of_table(table | {"parallel": parallel})
    if job.model.experts is None:
        parallel = {n: v for n, v in parallel.items() if n not in ("ep", "expert_tp")}
    return table | {"parallel": parallel | _dealt(job, table["parallel"])}


def _dealt(job: Job, said: Mapping[str, Any]) -> dict[str, Any]:
    slots, layers = job.parallel.slot_count, job.model.layers
    if slots == 1 or slots > layers + 2:
        return {}
    given, strict = said.get("layers_as") or [], job.framework.key in EVEN
    if len(given) == slots and sum(given) == layers:
        return {"layers_as": list(given)}
    ends = (layers + 2) % slots == 0
    if said.get("ends_as_layers") and (ends or not strict):
        return {"ends_as_layers": True}
    if layers % slots == 0 or not strict:
        return {}
    return (
        {"ends_as_layers": True}
        if ends
        else {"layers_as": list(job.parallel.slot_layers(job.model.layers, job.model.predicted))}
    )


# ---- a text as a plan


def plan_of_text(text: str) -> Plan:
    """The knobs of a job's text, and the rest of it."""
    table = parse_text(text)
    return replace(plan_of_job(job_of_table(table), table), run=table.get("run", {}))


def plan_of_job(job: Job, table: Mapping[str, Any]) -> Plan:
    """`table` is what the job was read from."""
    p, model, cluster = job.parallel, table.get("model", {}), table.get("cluster", {})
    preset = set(model) == {"preset"}
    software = table.get("framework", {})
    again = recompute_word(job.recompute)
    sharding = next((n for n, v in SHARDINGS.items() if v == (p.zero, p.fsdp)), "none")
    knobs = {
        "model": str(model["preset"]) if preset else KEPT,
        "platform": cluster.get("platform") or KEPT,
        "gpus": job.gpus, "tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep, "virtual": p.virtual,
        "schedule": "auto" if p.schedule == default_schedule(p.virtual) else p.schedule,
        "sharding": sharding, "global_batch": job.global_batch, "micro_batch": job.micro_batch,
        "sequence": job.sequence, "precision": job.precision,
        "recompute": again if again in RECOMPUTES else KEPT,
        "framework": job.framework.key, "price": cluster.get("price_per_gpu_hour"),
    }  # fmt: skip
    rest = _rest(table, job, knobs, software)
    return plan_of(knobs, rest)


def plan_like(text: str, best: Job) -> Plan:
    """The plan of a text, laid out over GPUs as another job."""
    table, p = parse_text(text), best.parallel
    parallel = {n: v for n, v in table.get("parallel", {}).items() if n not in OWN}
    said = {"ends_as_layers": p.ends_as_layers, "expert_tp": p.expert_tp if p.expert_tp > 1 else 0}
    parallel |= {n: v for n, v in said.items() if v}
    if p.tp > 1 and p.sequence_parallel != best.framework.sequence:
        parallel["sequence_parallel"] = p.sequence_parallel
    return plan_of_job(best, {**table, "parallel": parallel})


def _rest(table: Mapping[str, Any], job: Job, knobs: Mapping[str, Any], software: Any) -> dict[str, Any]:
    training, cluster = table.get("training", {}), table.get("cluster", {})
    parallel = {n: v for n, v in table.get("parallel", {}).items() if n in OWN}
    if job.parallel.shard:
        parallel["shard"] = job.parallel.shard
    out: dict[str, Any] = {
        "name": table.get("name") if table.get("name") != knobs["model"] else None,
        "model": table.get("model") if knobs["model"] == KEPT else None,
        "training": {n: v for n, v in training.items() if n not in KNOB_TRAINING}
        | ({"recompute": training["recompute"]} if knobs["recompute"] == KEPT else {}),
        "parallel": parallel,
        "overlap": table.get("overlap"),
        "framework": {n: v for n, v in software.items() if n != "name"} if isinstance(software, Mapping) else None,
        "cluster": {n: v for n, v in cluster.items() if n not in ("platform", "price_per_gpu_hour")},
    }
    return {name: value for name, value in out.items() if value}


def parse_text(text: str) -> dict[str, Any]:
    """The table of a job's text, which names no files."""
    if len(text) > LONGEST:
        raise InvalidPlan(f"that text has {len(text):,} letters: a job's has {LONGEST:,} at most")
    try:
        table = parse_toml(text, PLACE)
    except InputError as e:
        raise InvalidPlan(f"this text {e.problem}") from e
    if "embeddings" in table:
        raise InvalidPlan("that is a recommendation job, which this page does not plan: use presage dlrm")
    refuse_files(table)
    return table


# ---- jobs and predictions


def job_of_table(table: Mapping[str, Any], checked: bool = False) -> Job:
    return _described(table, checked).job


def job_of_text(text: str, checked: bool = True) -> Job:
    return job_of_table(parse_text(text), checked)


@lru_cache(128)
def predicted(text: str) -> JobResult:
    """What presage says of a job's text without draws. The same text, the same value: all users share it, and nobody
    changes it."""
    from presage.prediction.jobs.job_prediction import predict_job

    try:
        return replace(predict_job(_described(parse_text(text), checked=True)), drawn=False)
    except InvalidPlan:
        raise
    except PresageError as e:
        sentence = _sentence(e)
        raise InvalidPlan(sentence, knobs_named_in(sentence)) from e


def _described(table: Mapping[str, Any], checked: bool) -> ParsedJob:
    refuse_files(table)
    try:
        file = JobTable(Path(PLACE), table)
        found = file.parse(checked=False)
        _bounded(found.job)
        return file.parse() if checked else found
    except InvalidPlan:
        raise
    except PresageError as e:
        sentence = _sentence(e)
        raise InvalidPlan(sentence, knobs_named_in(sentence)) from e


def _bounded(job: Job) -> None:
    """What nobody trains, and would take this page hours or all its memory to work out."""
    m, p = job.model, job.parallel
    experts = m.experts.experts if m.experts else 0
    limits = (
        ("pp x virtual", p.slot_count, STAGES, "pp"), ("layers", m.layers, LAYERS, "model"),
        ("experts", experts, EXPERTS, "model"), ("hidden", m.hidden, WIDE, "model"), ("ffn", m.ffn, WIDE, "model"),
        ("vocab", m.vocab, 1 << 24, "model"), ("heads", m.heads, 1 << 16, "model"),
        ("sequence", job.sequence, 1 << 27, "sequence"), ("global_batch", job.global_batch, 1 << 26, "global_batch"),
    )  # fmt: skip
    for name, value, most, about in limits:
        if value > most:
            raise InvalidPlan(f"{name} is {value:,}: this page works with {most:,} at most", (about,))


def _sentence(e: PresageError) -> str:
    """Without the name of a file, which there is none of."""
    if not isinstance(e, InputError):
        return str(e)
    where = f"{e.field}: " if e.field else ""
    return where + e.problem.removeprefix(f"{PLACE}: ")


# ---- A plan from a page or a link is data: it may name no files.

FILES = {"arguments": "a Megatron script", "titan": "a TorchTitan file"}


def refuse_files(table: Mapping[str, Any]) -> None:
    """Raises where a job's table refers to a file: nothing on this machine is read on a page's word."""
    for key, what in FILES.items():
        if key in table:
            raise InvalidPlan(f"{key}: the page reads no files ({what}): start it with presage ui JOB.toml instead", ())
    if "config" in _subtable(table, "model"):
        raise InvalidPlan(
            "model.config: the page reads no files: start it with presage ui JOB.toml, or give the fields"
        )
    cluster, software = _subtable(table, "cluster"), table.get("framework", "")
    name = software.get("name") if isinstance(software, Mapping) else software
    for where, said, about in (
        ("cluster.platform", cluster.get("platform"), "platform"), ("cluster.gpu", cluster.get("gpu"), "platform"),
        ("framework", name, "framework"),
    ):  # fmt: skip
        if isinstance(said, str) and (said.lower().endswith(".toml") or "/" in said or "\\" in said or "\0" in said):
            raise InvalidPlan(f"{where}: the page reads no files: choose a known name", (about,))


def _subtable(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name, {})
    return found if isinstance(found, Mapping) else {}


# ---- What the page begins with: the job of a file that its owner names at the start, or an example.


@cache
def first_plan(path: Path | None) -> Plan:
    """Files that a job names are read here, once, because who starts the page says so; the page itself reads none."""
    if path is None:
        return plan_of_text(files("presage.ui").joinpath("first.toml").read_text("utf-8"))
    try:
        return plan_of_text(_job_text(path))
    except InvalidPlan as e:
        raise InputError(path, str(e)) from e


def _job_text(path: Path) -> str:
    file = JobTable.read(path)
    if file.has_embeddings:
        raise InputError(path, f"is a recommendation job, which the page does not plan: use presage dlrm {path}")
    try:
        refuse_files(file.table)
        return read_text(path)
    except InvalidPlan:
        parsed = file.parse(checked=False)
        run = {"run": file.table["run"]} if "run" in file.table else {}
        return job_toml(parsed.job, file.table.get("cluster", {})) + "\n" + table_toml(run)
