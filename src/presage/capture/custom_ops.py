"""Kernels that are not PyTorch's own: ops of torch.library, Triton kernels and functions of extensions.

What they compute is not known here. `register_op` says what one costs (and what it returns, where nothing else does);
without it, kernels are priced by the bytes that they read and write.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor

from presage.capture import torchrec_hooks
from presage.capture.backend import users_line
from presage.capture.built_extensions import replace_builders
from presage.capture.compiled import calls, is_capturing
from presage.capture.contents import current_recorder, leaves, unrecorded
from presage.errors import PresageError
from presage.graph.graph import OpCost

TRITON = "triton::"
KNOWN = {
    "aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "profiler", "torchvision",
    "quantized", "symm_mem", "inductor", "_dtensor",
}  # fmt: skip


@dataclass(frozen=True)
class RegisteredOp:
    """What is known of an op that PyTorch does not come with."""

    name: str
    cost: Callable[..., Mapping[str, float]]
    outputs: Callable[..., Any] | None = None

    def cost_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCost:
        found = self.cost(*args, **kwargs)
        ok = isinstance(found, Mapping) and found and found.keys() <= {"flops", "bytes", "seconds"}
        if not ok or not all(isinstance(v, int | float) and 0 <= v < float("inf") for v in found.values()):
            raise PresageError(
                f"the cost of {self.name} is {found!r}: return a dict with 'flops' and 'bytes', or with 'seconds'"
            )
        return OpCost(**{k: float(v) for k, v in found.items()})  # type: ignore[arg-type]


_registered: dict[str, RegisteredOp] = {}


def register_op(
    name: str, *, cost: Callable[..., Mapping[str, float]], outputs: Callable[..., Any] | None = None
) -> None:
    """Say what a custom op, a Triton kernel or an extension's function costs (see `prediction.api.register_op`)."""
    if not callable(cost) or not (outputs is None or callable(outputs)):
        raise PresageError(f"register_op({name!r}): cost and outputs are functions of the op's arguments")
    _registered[name] = RegisteredOp(name, cost, outputs)


def registered(name: str) -> RegisteredOp | None:
    return _registered.get(name) or BUILT_IN.get(name)


def no_outputs(name: str, line: str) -> PresageError:
    """The refusal of an op that says nothing of what it returns."""
    return PresageError(
        f"{line or 'the step'}: {name} has no fake implementation: what it returns, and its cost, are not known; give "
        f"it one (torch.library.register_fake), or presage.register_op({name!r}, cost=..., outputs=...)"
    )


def unpriced_note(names: Iterable[str]) -> Iterator[str]:
    found = sorted(names)
    if found:
        yield (
            f"priced by the bytes they read and write, for their FLOPs are not known: {', '.join(found)}; "
            f"presage.register_op({found[0]!r}, cost=...) says what one costs"
        )


# ---- ops of torch.library.custom_op, whose own code says what they run

_readable: dict[Any, bool] = {}  # by their code, whether it runs on fake tensors


def own_code(func: Any) -> Callable[..., Any] | None:
    """What runs the Python code of a custom op, where nobody says what it costs; NotImplemented if that fails."""
    name = func._schema.name
    written = getattr(OPDEFS.get(name), "_backend_fns", {}) if func.namespace not in KNOWN else {}
    code = written.get("cuda") or written.get(None)
    if code is None or registered(name) is not None or is_priced_by_bytes(name):
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (_readable[code] if code in _readable else _readable.setdefault(code, _runs(code, args, kwargs))):
            return NotImplemented
        with calls.in_custom_op():
            return code(*args, **kwargs)

    return run


def _runs(code: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether code runs on fake tensors; what it runs is not recorded."""
    with unrecorded() as recorder, calls.in_custom_op():
        before = recorder.failure
        try:
            code(*args, **kwargs)
            return recorder.failure is before
        except Exception:
            return False
        finally:
            recorder.failure = before


# ---- functions of extensions


def extension_patches() -> list[tuple[Any, str, Any]]:
    """Registered functions of modules, by their dotted names."""
    out = []
    for name, op in _registered.items():
        module, _, attribute = name.rpartition(".")
        if "::" in name or not module:
            continue
        try:
            out.append((import_module(module), attribute, _extension(op)))
        except ImportError:
            continue
    return out


def _extension(op: RegisteredOp) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        out = op.outputs(*args, **kwargs) if op.outputs is not None else None
        given = [x for x in leaves([args, *kwargs.values()]) if isinstance(x, torch.Tensor)]
        made = [x for x in leaves(out) if isinstance(x, torch.Tensor)]
        if recorder is not None:
            recorder.record_kernel(op.name, given, made, (), op.cost_of(args, kwargs))
        return out

    return run


class _HookedFinder(MetaPathFinder):
    """Replaces functions of modules, while a capture lasts, once these are loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        replace = HOOKED.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if replace is not None else None
        if spec is not None and spec.loader is not None and replace is not None:
            execute, change = spec.loader.exec_module, replace

            def exec_module(module: Any) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Launches of Triton kernels and the like are recorded while a capture lasts, whenever their modules are loaded."""
    for name, replace in HOOKED.items():
        if name in sys.modules:
            replace(sys.modules[name])
    sys.meta_path.insert(0, _HookedFinder())


def _replace_attention(fmha: Any) -> None:
    """xformers' attention runs the kernels that PyTorch's own chooses from."""
    own, causal = fmha.memory_efficient_attention, fmha.attn_bias.LowerTriangularMask

    def attention(
        query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None, **more: Any
    ) -> Any:
        if not is_capturing():
            return own(query, key, value, attn_bias, p, scale, **more)
        if query.dim() > 4 or not (attn_bias is None or type(attn_bias) is causal or isinstance(attn_bias, FakeTensor)):
            raise PresageError(
                f"{users_line()}: xformers' attention with {type(attn_bias).__name__} and {query.dim()} dimensions is "
                "not captured: give it 3 or 4, and a tensor, LowerTriangularMask or no bias, or say what it costs with "
                "presage.register_op('xformers.ops.memory_efficient_attention', cost=..., outputs=...)"
            )
        heads = [x.unsqueeze(1) if x.dim() == 3 else x.transpose(1, 2) for x in (query, key, value)]
        how: dict[str, Any] = {"is_causal": True} if type(attn_bias) is causal else {"attn_mask": attn_bias}
        dot_product: Any = torch.nn.functional.scaled_dot_product_attention
        out = dot_product(*heads, dropout_p=p, scale=scale, **how)
        return out.squeeze(1) if query.dim() == 3 else out.transpose(1, 2)

    fmha.memory_efficient_attention = attention


def _replace_launchers(autotuner: Any) -> None:
    kernel, tuned = autotuner.JITFunction, autotuner.Autotuner
    run, tune = kernel.run, tuned.run

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder() if is_capturing() else None
        if recorder is None:
            return run(self, *args, **kwargs)
        _record_launch(recorder, self, args, kwargs)
        return None

    def first_choice(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Which of the choices is fastest does not matter to what is recorded."""
        if not is_capturing() or current_recorder() is None:
            return tune(self, *args, **kwargs)
        return self.fn.run(*args, **{**kwargs, **self.configs[0].kwargs})

    kernel.run, tuned.run = launch, first_choice


HOOKED: dict[str, Callable[[Any], None]] = {
    "triton.runtime.autotuner": _replace_launchers,  # which imports all that is replaced
    "xformers.ops.fmha": _replace_attention,
    "torch.utils.cpp_extension": replace_builders,
    **torchrec_hooks.HOOKED,
}


def _record_launch(recorder: Any, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = TRITON + kernel.fn.__name__
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    tensors = {k: _tensor(v) for k, v in given.items() if isinstance(_tensor(v), FakeTensor)}
    known, (loaded, stored) = registered(name), _pointers(kernel)
    if not (loaded | stored) & tensors.keys():
        loaded = stored = set(tensors)
    written = [t for k, t in tensors.items() if k in stored]
    if known is not None:
        cost = known.cost_of(args, {k: v for k, v in kwargs.items() if k in kernel.arg_names})
    else:
        read = [t for k, t in tensors.items() if k in loaded]
        cost = OpCost(bytes=float(sum(_nbytes(t) for t in (*read, *written))))
        recorder.unpriced[name] = None
    recorder.record_kernel(name, list(tensors.values()), (), written, cost)


def _tensor(value: Any) -> Any:
    """The tensor of an argument; Triton's own view of one with another type holds it."""
    return getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value


def _nbytes(t: torch.Tensor) -> int:
    """Bytes under a tensor; what a stride of zero repeats counts once."""
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride else 1
    return elements * t.element_size()


@cache
def _pointers(kernel: Any) -> tuple[set[str], set[str]]:
    """The arguments that a kernel loads from, and those that it stores to, as its code says."""
    try:
        tree = ast.parse(textwrap.dedent(kernel.src))
    except (SyntaxError, AttributeError, TypeError):
        return set(), set()
    reached: dict[str, set[str]] = {name: {name} for name in kernel.arg_names}
    loaded, stored = set[str](), set[str]()
    for _ in range(2):  # loops: what is assigned below may be used above
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                    reached.setdefault(target.id, set()).update(_names(node.value, reached))
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        what = called.attr if isinstance(called, ast.Attribute) else ""
        if not isinstance(node, ast.Call) or not (what == "load" or what == "store" or what.startswith("atomic_")):
            continue
        pointers = _names(node.args[0], reached) if node.args else set[str]()
        (loaded if what == "load" else stored).update(pointers)
    return loaded, stored


def _names(node: ast.AST, reached: Mapping[str, set[str]]) -> set[str]:
    """The arguments that a value is computed from, but for those that were loaded."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
        return set()
    if isinstance(node, ast.Name):
        return set(reached.get(node.id, ()))
    return {name for child in ast.iter_child_nodes(node) for name in _names(child, reached)}


# ---- libraries whose kernels are known

_FLASH_FORWARD, _FLASH_BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
_BYTES_ALONE = re.compile(r"^bitsandbytes::(de)?quantize_|^bitsandbytes::optimizer_update|^flash_attn::")
_KERNEL_PACKAGES = {
    "mamba_ssm": re.compile(r"mamba[-_]ssm"),
    "causal_conv1d": re.compile(r"causal[-_]conv1d"),
    "fla": re.compile(r"flash[-_]linear[-_]attention|\bfrom fla\b"),
}


def same_as(name: str, args: Sequence[Any]) -> tuple[str, tuple[Any, ...]] | None:
    """PyTorch's own op that runs the same kernel, with its arguments: flash-attn's and PyTorch's are the same code."""
    if name == "flash_attn::_flash_attn_forward":
        q, k, v, dropout, _, causal = args[:6]
        return _FLASH_FORWARD, (q, k, v, None, None, q.shape[1], k.shape[1], dropout, causal, False)
    if name == "flash_attn::_flash_attn_backward":
        grad, q, k, v, out, lse, _, _, _, dropout, _, causal = args[:12]
        lengths = None, None, q.shape[1], k.shape[1]
        return _FLASH_BACKWARD, (grad, q, k, v, out, lse, *lengths, dropout, causal, None, None)
    return None


def _flash_varlen(products: int) -> Callable[..., Mapping[str, float]]:
    """Sequences of several lengths, one after the other: [tokens, heads, depth]."""

    def cost(*args: Any) -> Mapping[str, float]:
        q, k, v = args[:3] if products == 2 else args[1:4]
        numbers = [a for a in args if type(a) is int]
        causal = next((a for a in args if type(a) is bool), False)
        keys = numbers[1] if len(numbers) > 1 else k.shape[0]
        flops = 2 * products * q.numel() * keys * (0.5 if causal else 1.0)
        return {"flops": flops, "bytes": (2 if products == 2 else 4) * sum(_nbytes(t) for t in (q, k, v))}

    return cost


def _product_4bit(a: Any, b: Any, shape: Sequence[int], *_: Any) -> Mapping[str, float]:
    rows = a.numel() // a.shape[-1]
    moved = _nbytes(a) + _nbytes(b) + rows * shape[0] * a.element_size()
    return {"flops": 2.0 * rows * shape[0] * shape[1], "bytes": float(moved)}


def _product_int8(a: Any, b: Any, *_: Any) -> Mapping[str, float]:
    return {"flops": 2.0 * a.numel() * b.shape[0], "bytes": float(_nbytes(a) + _nbytes(b))}


BUILT_IN = {
    name: RegisteredOp(name, cost)
    for name, cost in {
        "bitsandbytes::gemm_4bit": _product_4bit,
        "bitsandbytes::gemv_4bit": _product_4bit,
        "bitsandbytes::int8_linear_matmul": _product_int8,
        "bitsandbytes::int8_scaled_mm": _product_int8,
        "flash_attn::_flash_attn_varlen_forward": _flash_varlen(2),
        "flash_attn::_flash_attn_varlen_backward": _flash_varlen(5),
    }.items()
}


def is_priced_by_bytes(name: str) -> bool:
    """Whether bytes are all that a custom op costs."""
    return bool(_BYTES_ALONE.search(name))


def slow_paths(roots: Iterable[torch.nn.Module]) -> Iterator[str]:
    """Notes on models whose code has kernels of packages that are not installed here, and ran without them."""
    kinds = {type(m) for root in roots for m in root.modules()}
    for module in sorted({kind.__module__ for kind in kinds if not kind.__module__.startswith("torch.")}):
        missing = [p for p in _packages_named(module) if p not in sys.modules and find_spec(p) is None]
        if missing:
            yield (
                f"{module} ran in plain PyTorch, for {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not installed here; with their kernels the step is faster"
            )


@cache
def _packages_named(module: str) -> tuple[str, ...]:
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        text = Path(file).read_text() if file else ""
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(p for p, pattern in _KERNEL_PACKAGES.items() if pattern.search(text))


_NOT_RUN = re.compile(
    r"data pointer|no NVIDIA driver|no CUDA-capable device|driver version is ins|must be (a|on) CUDA|CUDA error"
)


def unreadable(error: BaseException) -> str:
    """What to say where compiled code looked for a real GPU, or for the numbers in its memory; '' for other errors."""
    text = str(error)
    if not _NOT_RUN.search(text) or text.startswith("aten::"):
        return ""
    return (
        "compiled code was called that needs a real GPU: say what its function returns and costs with "
        f'presage.register_op("module.function", cost=..., outputs=...) ({text.strip().splitlines()[0][:120]})'
    )
