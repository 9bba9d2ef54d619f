"""The training software presage knows, from its fact files."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from presage.configs.schema import FrameworkConfig, OverlapConfig, convert_section, given_fields
from presage.errors import InputError, PresageError
from presage.hardware import Gpu
from presage.hardware.facts import load_toml
from presage.parallel.dispatchers import USUAL, dispatcher_name, dispatchers

ATTENTIONS = ("unfused", "fused-softmax", "flash1", "flash2", "flash3")
HOSTS = ("megatron-core", "megatron-2021", "deepspeed", "torch", "torch-gpt", "compiled", "graph")
GRAPHED = ("attn", "mlp", "moe_router", "moe_preprocess")  # Megatron-Core's cuda_graph_scope
SINCE = {"hopper": 9.0, "blackwell": 10.0}  # compute capability
MB = 1e6


class _File(FrameworkConfig):
    source: str = ""
    date: str = ""
    hopper: FrameworkConfig = msgspec.field(default_factory=FrameworkConfig)  # over the others, from such GPUs on
    blackwell: FrameworkConfig = msgspec.field(default_factory=FrameworkConfig)
    overlap: OverlapConfig = msgspec.field(default_factory=OverlapConfig)


@cache
def frameworks() -> tuple[str, ...]:
    """The names of those that come with presage."""
    there = files("presage.configs").joinpath("frameworks").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in there if f.name.endswith(".toml")))


def framework(name: str, gpu: Gpu | None = None, **overrides: Any) -> Framework:
    """A framework by name (megatron-core) or from a .toml file; some switches depend on the GPU.

    Overrides are fields of Framework.
    """
    base = _shipped(name, generation(gpu)) if not name.endswith(".toml") else read_framework(name, gpu)
    if not overrides:
        return base
    known = {f.name for f in fields(Framework)}
    for key in overrides:
        if key not in known:
            near = get_close_matches(key, known, 1)
            raise PresageError(f"a framework has no switch {key!r}{f': did you mean {near[0]!r}?' if near else ''}")
    changed = replace(base, **overrides)
    _check_switches(name, changed)
    return changed


def read_framework(path: str | Path, gpu: Gpu | None = None) -> Framework:
    """A framework from its fact file."""
    return _read(Path(path), generation(gpu))


def overlap_of(name: str) -> Overlap:
    """The default overlap of a framework."""
    return framework(name).overlap


def switches(words: FrameworkConfig) -> dict[str, Any]:
    """The fields of a Framework that a table gives."""
    out = {k: v for k, v in given_fields(words).items() if k in FrameworkConfig.__struct_fields__ and k != "name"}
    if "dispatcher" in out:
        out["dispatcher"] = dispatcher_name(out["dispatcher"])
    if "graphs" in out:
        out["graphs"] = tuple(out["graphs"])
    if "bucket_MB" in out:
        out["bucket_bytes"] = out.pop("bucket_MB") * MB
    return out


@cache
def _shipped(name: str, generation: float) -> Framework:
    if name not in frameworks():
        near = get_close_matches(name.lower(), frameworks(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        there = ", ".join(frameworks())
        raise PresageError(f"unknown framework {name!r}: choose from {there}, or the path of a .toml file{hint}")
    return _read(Path(str(files("presage.configs").joinpath("frameworks", f"{name}.toml"))), generation)


def _read(path: Path, generation: float) -> Framework:
    file = convert_section(path, load_toml(path), _File)
    fields_given = switches(file)
    for since, least in SINCE.items():
        if generation >= least:
            fields_given |= switches(getattr(file, since))
    overlap = Overlap(**given_fields(file.overlap))
    out = Framework(key=path.stem, name=file.name or path.stem, source=file.source, overlap=overlap, **fields_given)
    _check_switches(path, out)
    return out


def generation(gpu: Gpu | None) -> float:
    """Its compute capability; 0 for other makers' GPUs, and for none."""
    try:
        return float(gpu.compute_capability) if gpu else 0.0
    except ValueError:
        return 0.0


def _check_switches(path: str | Path, f: Framework) -> None:
    for name, value, known in (("attention", f.attention, ATTENTIONS), ("host", f.host, HOSTS)):
        if value not in known:
            raise InputError(path, f"is {value!r}: choose from {', '.join(known)}", name)
    for name in ("gradient_bytes", "reduce_bytes", "gather_bytes"):
        if getattr(f, name) not in (1, 2, 4):
            raise InputError(path, f"is {getattr(f, name)!r}: it can be 1, 2 or 4", name)
    for name in ("logit_bytes", "extra_bytes", "update_bytes", "forward_us", "backward_us"):
        if not 0 <= getattr(f, name) <= 1e6:
            raise InputError(path, f"is {getattr(f, name)!r}: it can be 0 to 1e6", name)
    for part in f.graphs:
        if part not in GRAPHED:
            instead = 'host = "graph" stands for graphs of whole steps'
            raise InputError(path, f"knows no part {part!r}: choose from {', '.join(GRAPHED)}; {instead}", "graphs")
    if f.dispatcher not in dispatchers():
        raise InputError(path, f"is {f.dispatcher!r}: choose from {', '.join(dispatchers())}", "dispatcher")
    if not 1e3 <= f.bucket_bytes <= 1e16:
        raise InputError(path, f"is {f.bucket_bytes / MB:g}: it can be 0.001 to 1e10", "bucket_MB")


# ---- A Framework: what the software around a model does, as far as it costs time or memory. Facts, as TOML files.


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which communication overlaps with compute."""

    tensor: bool = False  # TP collectives, cut up beside the products they feed
    gradients: bool = True  # DP reductions beside the backward pass
    parameters: bool = True  # DP gathers beside the forward pass
    pipeline: bool = True  # sends between stages
    context: bool = True  # keys and values beside attention
    experts: bool = False  # exchanges with experts beside another microbatch's pass, the other way
    shared_experts: bool = False  # or beside the shared experts of the same layer
    weight_gradients: bool = False  # put off, beside the exchanges of the backward pass


@dataclass(frozen=True, slots=True)
class Framework:
    """Switches of the training software; the default is Megatron-Core with Transformer Engine as of 2024."""

    key: str = "megatron-core"
    name: str = "Megatron-Core with Transformer Engine"
    attention: str = "flash2"  # unfused, fused-softmax (Megatron's kernel), flash1, flash2, flash3 (cuDNN since Hopper)
    compiled: bool = False  # pointwise chains are one kernel each (torch.compile, XLA)
    fused_norms: bool = True  # one kernel a normalisation
    dropout: bool = False  # of attention and of the residual stream
    fused_loss: bool = True  # cross entropy without copies of the logits in fp32
    gradient_bytes: int = 4  # what gradients are kept in
    reduce_bytes: int = 4  # and sent in
    gather_bytes: int = 2  # what parameters are gathered in
    host: str = "megatron-core"  # whose launches: one of HOSTS in frameworks.py
    bucket_bytes: float = 40e6 * 4  # of gradients that are reduced at once
    dispatcher: str = USUAL  # of tokens to experts: one of `dispatchers()`
    fused_adapters: bool = True  # adapters are added to a GEMM's result in 16 bits by a kernel or two, not as PEFT does
    graphs: tuple[str, ...] = ()  # parts of a layer that are CUDA graphs: some of GRAPHED
    broadcasts: bool = False  # ZeRO-1: each rank broadcasts the parameters it updated, one after the other
    flat_gathers: bool = False  # ZeRO-3 of 2021: all that is gathered goes over each rank's own network card
    sequence: bool = True  # sequence parallelism wherever there is tensor parallelism
    async_backward: bool = True  # of TP, what the backward pass sends for an input runs beside the weights' gradient
    fused_accumulation: bool = (
        True  # of Megatron-Core: products add weight gradients to the accumulated ones themselves
    )
    attention_masks: bool = False  # the data loader makes a mask of sequence x sequence for each sample
    grouped_experts: bool = True  # a rank's experts are one grouped product, not one after the other
    foreach: bool = False  # gradients are freed before each step, and updated as lists of tensors (PyTorch's foreach)
    logit_bytes: float = 0.0  # of the loss at its worst moment, for each logit; 0: as the framework's kernels have it
    extra_bytes: float = 0.0  # that a layer's memory-bound kernels move besides, forward and backward, by number
    update_bytes: float = 0.0  # that the optimizer moves for a parameter; 0: as usual for it
    forward_us: float = 0.0  # of the host, for a layer of a microbatch; 0: as the host model has it
    backward_us: float = 0.0
    overlap: Overlap = field(default_factory=Overlap)  # unless a job says otherwise
    source: str = ""
