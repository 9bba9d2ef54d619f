"""Loss: the logits of one microbatch and what the cross entropy makes of them, where the head is."""

from __future__ import annotations

from presage.configs.job import Job
from presage.memory.activations import number_bytes
from presage.memory.parameter_shards import padded

__all__ = ["logits"]


def logits(job: Job) -> tuple[float, float]:
    """Bytes at the worst moment, and of freed blocks that nothing of this size can use again."""
    m, p, f = job.model, job.parallel, job.framework
    e = number_bytes(job.precision)
    count = float(padded(m.vocab, p.tp)) * job.rank_tokens * (1 + m.predicted)
    back = (
        e * (m.hidden + (m.hidden / p.tp if p.sequence_parallel else 0.0)) * job.rank_tokens
    )  # gradient of the head's input
    if f.fused_loss:  # gradients are written over the logits; a compiled loss writes them beside
        return (2 * e if f.compiled else e) * count + back, 0.0
    if f.host in ("deepspeed", "megatron-2021", "megatron-core", "graph"):
        return (e + 8.0) * count, 0.0  # the logits, in fp32, and their exponentials
    # PyTorch: log-probabilities, their gradient and that of the logits, all in fp32; the logits are free by then
    return 12.0 * count, e * count
