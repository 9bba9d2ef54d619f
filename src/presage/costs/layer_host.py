"""Host time of a transformer layer in each framework: ops counted, times the host time of an op.

Where a microbatch is small the GPU waits for the host, and the step is as long as the host takes to launch it. Counts
and times are in `data/layer_host.toml` with their sources: layers captured from plain PyTorch and priced by the host
model of an H200's machine, what Megatron adds from a trace of it, collectives from `hooks`. None is fitted on steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import msgspec

from presage.costs.host_constants import LAYER
from presage.errors import PresageError
from presage.files.decoding import convert_record
from presage.files.reading import shipped_toml

US = 1e-6
GRAPH_US = LAYER["graph_us"]
ENDS_FORWARD = 10  # launches of embedding, norm, head and loss, where a framework adds none of its own
SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 6, 5  # launches more where softmax is PyTorch's: cast, scale, mask, softmax, cast
COMPILED_KERNELS = 9  # of a compiled layer's forward: four products, attention, four fused ones
ALIASES = {"deepspeed": "megatron-2021", "megatron-deepspeed": "megatron-2021"}


@dataclass(frozen=True, slots=True)
class LayerHost:
    """Seconds of the host, at its usual pace."""

    forward: float  # of one layer for one microbatch, its tensor-parallel collectives with it
    backward: float
    recompute: float  # the forward again, and what checkpointing adds
    ends_forward: float  # batch, embedding, head and loss of a microbatch
    ends_backward: float
    optimizer: float  # once a step
    collective: float
    send: float  # a send between stages, or its receive
    optimizer_layer: float = 0.0  # and for each layer


class ExpertHost(NamedTuple):
    """What the host time of a layer with experts depends on."""

    dispatcher: str
    local: int  # experts of a rank
    overlapped: bool = False  # exchanges run beside another microbatch's compute
    pace: float = 1.0  # times as long as counted


class _Captured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forward: float = 0.0
    backward: float = 0.0
    launches_forward: int = 0
    launches_backward: int = 0


class _Layers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    date: str
    layers: dict[str, _Captured]


class _Traced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    date: str
    function: float
    region: float
    kernel: float
    python: float
    ends_launches: int
    ends_plain: int


class _Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernel_forward: float
    kernel_backward: float
    plain: float
    empty_node: float
    checkpoint: float
    threads: float
    collective: float
    parameter_step: float
    parameter_copy: float
    optimizer: float
    wait: float


class _Framework(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layer: str
    functions: int
    empty_functions: int
    regions: int
    region_kernels_backward: int
    python: bool
    ends_backward_launches: int
    parameters: int
    copies: int
    optimizer_launches: int


class _Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forward: int
    backward: int
    collectives_forward: int
    collectives_backward: int
    waits: int


class _Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    date: str
    mlp_share: float
    router_forward: int
    router_backward: int
    preprocess: int
    python: float
    linear_forward: float
    linear_backward: float
    expert_forward: float
    expert_backward: float
    nodes: int
    node_forward: float
    dispatchers: dict[str, _Exchange]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    captured: _Layers
    traced: _Traced
    terms: _Terms
    frameworks: dict[str, _Framework]
    experts: _Experts
    eras: dict[str, float]


@cache
def host_facts() -> _File:
    """Counts and times of data/layer_host.toml."""
    return convert_record(shipped_toml("layer_host.toml"), _File)


def hosts_known() -> tuple[str, ...]:
    """Names of the known frameworks, aliases included."""
    return (*host_facts().frameworks, *ALIASES)


def eras() -> tuple[str, ...]:
    """Names of the host generations."""
    return tuple(host_facts().eras)


@cache
def layer_host(
    framework_host: str,
    era: str = "h100",
    tp: int = 1,
    sequence_parallel: bool = False,
    experts: ExpertHost | None = None,
    fused_attention: bool = True,
    fused_softmax: bool = True,
    graphs: tuple[str, ...] = (),
) -> LayerHost:
    """The host's seconds in a framework, on a host of a GPU generation's time."""
    facts = host_facts()
    which = facts.frameworks.get(ALIASES.get(framework_host, framework_host))
    if which is None:
        raise PresageError(f"no host costs for {framework_host!r}: choose from {', '.join(hosts_known())}")
    if era not in facts.eras:
        raise PresageError(f"unknown era {era!r} of hosts: choose from {', '.join(facts.eras)}")
    times = _graph(facts) if framework_host == "graph" else _layer_times(facts, which, fused_attention)
    if not fused_softmax and framework_host != "graph":
        t = facts.terms
        times = _plus(times, SOFTMAX_FORWARD * t.kernel_forward, SOFTMAX_BACKWARD * t.kernel_backward)
    if framework_host != "graph" and (experts or graphs):
        times = _with_blocks(facts, times, experts, graphs, framework_host == "compiled")
    if tp > 1 and framework_host != "graph":
        times = _with_collectives(times, sequence_parallel)
    return _paced(times, facts.eras[era])


def _layer_times(f: _File, which: _Framework, fused: bool) -> LayerHost:
    """Host microseconds of a layer by part."""
    forward, backward = _layer(f, which, fused)
    t, seen = f.terms, f.traced
    ends = seen.ends_launches if which.python else ENDS_FORWARD
    return LayerHost(
        forward=forward,
        backward=backward,
        recompute=forward + t.checkpoint,
        ends_forward=ends * t.kernel_forward + (seen.ends_plain if which.python else ENDS_FORWARD) * t.plain,
        ends_backward=which.ends_backward_launches * t.kernel_backward + t.threads,
        optimizer=t.optimizer + which.optimizer_launches * t.parameter_copy,
        collective=t.collective,
        send=t.collective + seen.function,
        optimizer_layer=which.parameters * t.parameter_step + which.copies * t.parameter_copy,
    )


def _layer(f: _File, which: _Framework, fused: bool) -> tuple[float, float]:
    """One layer on one rank, forward and backward."""
    t, seen = f.terms, f.traced
    ops = f.captured.layers.get(which.layer, _Captured())
    more = _Captured() if fused or not which.layer else f.captured.layers["unfused_more"]
    around = which.functions * seen.function
    forward = ops.forward + more.forward + around + which.regions * seen.region + which.python * seen.python
    inside = seen.region + which.region_kernels_backward * (seen.kernel if not which.layer else t.kernel_backward)
    backward = ops.backward + more.backward + around + which.empty_functions * t.empty_node + which.regions * inside
    return forward + (0.0 if which.layer else COMPILED_KERNELS * seen.kernel), backward


def _graph(f: _File) -> LayerHost:
    """All of a step's passes in CUDA graphs; the optimizer outside."""
    graph = dict.fromkeys(LayerHost.__slots__, GRAPH_US)
    return LayerHost(**graph | {"optimizer": f.terms.optimizer, "optimizer_layer": f.terms.parameter_step})


def _with_blocks(f: _File, h: LayerHost, e: ExpertHost | None, graphs: tuple[str, ...], compiled: bool) -> LayerHost:
    """With experts in place of the feed-forward block, and parts of a layer that are CUDA graphs."""
    mlp = f.experts.mlp_share
    attention = (GRAPH_US, GRAPH_US) if "attn" in graphs else ((1 - mlp) * h.forward, (1 - mlp) * h.backward)
    if e is not None:
        block = _experts(f, e, graphs, compiled)
    else:
        block = (GRAPH_US, GRAPH_US) if "mlp" in graphs else (mlp * h.forward, mlp * h.backward)
    forward, backward = (a + b for a, b in zip(attention, block, strict=True))
    return _plus(h, forward - h.forward, backward - h.backward)


def _experts(f: _File, e: ExpertHost, graphs: tuple[str, ...], compiled: bool) -> tuple[float, float]:
    """Router, dispatch, grouped linear layers and combine, forward and backward; cheaper in compiled code."""
    x, t, d = f.experts, f.terms, f.experts.dispatchers[e.dispatcher]
    ahead, back = (f.traced.kernel,) * 2 if compiled else (t.kernel_forward, t.kernel_backward)
    routed = "moe_router" in graphs
    router = (GRAPH_US, GRAPH_US) if routed else (x.router_forward * ahead, x.router_backward * back)
    counted = 0.0 if "moe_preprocess" in graphs else x.preprocess * ahead
    linear = 2 * (x.linear_forward + e.local * x.expert_forward), 2 * (x.linear_backward + e.local * x.expert_backward)
    sent = d.forward * ahead + d.collectives_forward * t.collective + d.waits * t.wait
    forward = router[0] + counted + sent + linear[0] + x.python
    backward = router[1] + d.backward * back + d.collectives_backward * t.collective + linear[1]
    more = (x.nodes * x.node_forward, x.nodes * t.threads) if e.overlapped else (0.0, 0.0)
    return (forward + more[0]) * e.pace, (backward + more[1]) * e.pace


def _with_collectives(h: LayerHost, sequence_parallel: bool) -> LayerHost:
    """An all-reduce a block and pass; or a gather and a scatter, and backward a gather of what was kept split."""
    ahead, back = (4, 6) if sequence_parallel else (2, 2)
    return _plus(h, ahead * h.collective, back * h.collective)


def _plus(h: LayerHost, forward: float, backward: float) -> LayerHost:
    values = {f: getattr(h, f) for f in LayerHost.__slots__}
    more = {"forward": forward, "backward": backward, "recompute": forward}
    return LayerHost(**{f: v + more.get(f, 0.0) for f, v in values.items()})


def _paced(h: LayerHost, pace: float) -> LayerHost:
    """Seconds at an era's pace."""
    return LayerHost(**{f: getattr(h, f) * US * pace for f in LayerHost.__slots__})
