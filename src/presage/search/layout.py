"""A Layout: one way to lay a job out over GPUs. What a search varies; the model, the batch and the software stay."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job, Parallel, Recompute

__all__ = ["KNOBS", "RECOMPUTES", "Layout", "knob", "laid", "layout_of", "recompute_word", "sharding_word", "words"]

# What of the forward pass is computed again, by its word in job files.
RECOMPUTES = {
    "none": Recompute(),
    "selective": Recompute("selective", ("core_attn",)),
    "every-2": Recompute("full", share=0.5),
    "full": Recompute("full"),
}
# What can be held fast, and by which plans are compared.
KNOBS = (
    "gpus", "tp", "cp", "pp", "virtual", "schedule", "ep", "expert_tp", "dp", "micro_batch", "zero", "sharding",
    "recompute",
)  # fmt: skip


class Layout(NamedTuple):
    """Degrees and choices of one plan."""

    gpus: int
    tp: int
    sequence: bool
    cp: int
    pp: int
    ep: int
    expert_tp: int
    micro_batch: int
    virtual: int
    schedule: str
    ends: bool  # embedding and head count as a layer each where layers are dealt out
    zero: int
    fsdp: bool
    shard: int
    recompute: Recompute

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.cp * self.pp)


def laid(job: Job, x: Layout) -> Job:
    """The job, laid out so."""
    parallel = Parallel(
        x.tp, x.sequence, x.pp, x.virtual, x.schedule, x.cp, x.ep, x.expert_tp, x.zero, x.fsdp, x.shard, (), x.ends
    )
    return Job(
        job.model, job.platform, x.gpus, job.sequence, x.micro_batch, job.global_batch, parallel, job.precision,
        x.recompute, job.overlap, job.framework, job.optimizer, job.name,
    )  # fmt: skip


def layout_of(job: Job) -> Layout:
    """How a job is laid out; layers that are dealt out by hand are not told."""
    p = job.parallel
    return Layout(
        job.gpus, p.tp, p.sequence, p.cp, p.pp, p.ep, p.expert_tp, job.micro_batch, p.virtual, p.schedule,
        p.ends_as_layers, p.zero, p.fsdp, p.shard, job.recompute,
    )  # fmt: skip


def knob(x: Layout, name: str) -> str:
    """The word for what a plan chose of a knob."""
    if name == "sharding":
        return sharding_word(x)
    if name == "recompute":
        return recompute_word(x.recompute)
    return str(getattr(x, name))


def sharding_word(x: Layout) -> str:
    if not x.fsdp:
        return f"zero{x.zero}/{x.shard}" if x.shard else f"zero{x.zero}"
    kind = f"hsdp{x.shard}" if x.shard else "fsdp"
    return kind if x.zero == 3 else f"{kind}-zero{x.zero}"


def recompute_word(r: Recompute) -> str:
    """As job files have it: none, selective:mlp+moe_act, full, every-2."""
    for word, known in RECOMPUTES.items():
        if r == known:
            return word
    if r.mode == "selective":
        return f"selective:{'+'.join(r.modules)}" if r.modules else "selective"
    return f"full:{r.share:.3g}" if r.mode == "full" else r.mode


def words(x: Layout) -> str:
    """A plan in a line: tp8 pp16 v4 dp128 mb1 zero1 full. `ends`: embedding and head take a layer's place each."""
    degrees = [
        (x.tp, f"tp{x.tp}"), (x.cp, f"cp{x.cp}"), (x.pp, f"pp{x.pp}"), (x.virtual, f"v{x.virtual}"),
        (2 * (x.schedule in ("zero-bubble", "gpipe") and x.pp > 1), x.schedule), (2 * (x.ends and x.pp > 1), "ends"),
        (x.ep, f"ep{x.ep}"), (x.expert_tp, f"etp{x.expert_tp}"),
    ]  # fmt: skip
    said = [word for degree, word in degrees if degree > 1]
    said += [f"dp{x.dp}", f"mb{x.micro_batch}"]
    if x.tp > 1 and not x.sequence:
        said.append("no-sp")
    if x.zero:
        said.append(sharding_word(x))
    return " ".join([*said, recompute_word(x.recompute)])
