"""Makes the changes of a Variant around the user's code: hooks on modules, optimizers and the backward pass.

Everything patched here is put back when the context ends. The first step (the warm-up) also serves to learn how many
backward passes a step has, and which tensors it is given from outside.
"""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from presage.capture import attention as fused_attention
from presage.capture import fake_device
from presage.capture.call_sites import with_closure
from presage.capture.variants import NotApplicable, Variant
from presage.errors import PresageError

Step = Callable[[], Any]
FORMS: dict[str, dict[str, Any]] = {"fused": {"fused": True, "foreach": None}, "foreach": {"foreach": True}}


@contextmanager
def hooked(variant: Variant) -> Iterator[VariantHooks]:
    """The variant is in force while this lasts."""
    with ExitStack() as stack:
        hooks = VariantHooks(variant)
        for owner, name, value in hooks.patches():
            stack.enter_context(fake_device.patched(owner, name, value))
        for hook in hooks.optimizer_hooks():
            stack.callback(hook.remove)
        stack.enter_context(fused_attention.intercepted() if variant.fused_attention else nullcontext())
        stack.enter_context(fake_device.fake_tracing() if variant.traced else nullcontext())
        yield hooks


class _Stop(BaseException):
    """Ends a microbatch after its backward pass."""


class VariantHooks:
    """State of a variant during one capture."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.dtype: Any = getattr(torch, variant.dtype) if variant.dtype else None
        self.converts = self.dtype is not None or variant.channels_last
        self.modules: list[weakref.ref[nn.Module]] = []  # in the order they were constructed
        self.seen: set[int] = set()  # modules that were converted and searched for blocks
        self.blocks: set[int] = set()  # modules to checkpoint
        self.optimizers: list[Optimizer] = []
        self.forms: dict[int, tuple[Any, Any]] = {}  # by optimizer: its own fused and foreach
        self.given: list[weakref.ref[torch.Tensor]] = []  # inputs of the model that had to be converted
        self.depth = 0  # of module calls
        self.backwards = 0  # backward passes of this step so far
        self.stop_after = -1  # the backward pass that ends a microbatch
        self.in_backward = False
        self.keeps_gradients = False  # zero_grad does nothing
        self.outside: list[Any] = []  # autocast contexts that switch it off

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        v = self.variant
        yield nn.Module, "__init__", self._noted(nn.Module.__init__)
        yield nn.Module, "__setstate__", self._noted(nn.Module.__setstate__)  # of a deep copy: it has no __init__
        yield Optimizer, "__init__", self._optimizer_init()
        if self.converts or v.checkpoint is not None:
            yield nn.Module, "__call__", self._module_call()
        if v.dtype:
            yield torch.amp.autocast_mode.autocast, "__init__", _no_autocast()
        if v.autocast or v.accumulate > 1:
            yield torch.autograd, "_engine_run_backward", self._run_backward()
        if v.accumulate > 1:
            for owner in (Optimizer, nn.Module):
                yield owner, "zero_grad", self._zero_grad(owner)
        if v.optimizer or v.capturable:
            for kind in vars(torch.optim).values():
                if isinstance(kind, type) and issubclass(kind, Optimizer) and "__init__" in vars(kind):
                    yield kind, "__init__", self._form(kind)

    def optimizer_hooks(self) -> Iterator[Any]:
        if self.variant.optimizer == "fused":
            yield optimizer_hooks.register_optimizer_step_pre_hook(self._sparse_is_not_fused)
        if self.variant.autocast:
            yield optimizer_hooks.register_optimizer_step_pre_hook(self._optimizer_begins)
            yield optimizer_hooks.register_optimizer_step_post_hook(self._optimizer_ends)

    def wrapped(self, step: Any) -> Any:
        """The step with the variant around it; the build has ended."""
        if not callable(step):
            return step
        v = self.variant
        self._built()

        def run() -> Any:
            with self._autocast():
                return self._microbatches(step) if v.accumulate > 1 else step()

        def first() -> Any:
            with self._autocast():
                result = step()
            self._convert_inputs()
            if v.accumulate > 1 and not self.backwards:
                raise NotApplicable("no backward pass that could run more than once before the optimizer")
            self.stop_after = self.backwards
            return result

        calls = iter([first])
        return lambda: next(calls, run)()

    @contextmanager
    def around_script(self) -> Iterator[None]:
        """The variant around a whole script, whose steps are not ours to call."""
        if self.variant.accumulate > 1:
            raise NotApplicable("a script's own loop cannot be made to accumulate: change its arguments, after --")
        with self._autocast():
            yield

    def between_steps(self) -> None:
        """A step of a script has ended, and its model is built."""
        self._built()
        self._convert_inputs()

    def _built(self) -> None:
        self._see_all()
        if self.variant.checkpoint is not None and not self.blocks and self.modules:
            _no_blocks(self.variant.checkpoint)
        if self.variant.tf32:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def _autocast(self) -> Any:
        dtype = self.variant.autocast
        return torch.autocast("cuda", dtype=getattr(torch, dtype)) if dtype else nullcontext()

    # ---- modules: types, layouts, checkpoints

    def _noted(self, begin: Callable[..., None]) -> Any:
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            begin(module, *args, **kwargs)
            self.modules.append(weakref.ref(module))

        return init

    def _module_call(self) -> Any:
        call = nn.Module.__call__

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.depth:
                self._see(module)
                if self.converts:
                    args, kwargs = tree_map(self._input, (args, kwargs))
            self.depth += 1
            try:
                if id(module) in self.blocks and _keeps_activations():
                    return checkpoint(call, module, *args, use_reentrant=False, **kwargs)
                return call(module, *args, **kwargs)
            finally:
                self.depth -= 1

        return run

    def _see_all(self) -> None:
        """Convert and search the outermost modules constructed so far."""
        alive = [m for ref in self.modules if (m := ref()) is not None]
        inner = {id(child) for m in alive for child in m.children()}
        for module in alive:
            if id(module) not in inner:
                self._see(module)

    def _see(self, module: nn.Module) -> None:
        if id(module) in self.seen:
            return
        self.seen |= {id(m) for m in module.modules()}
        if self.dtype is not None:
            module.to(self.dtype)
        if self.variant.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.variant.checkpoint is not None:
            self.blocks |= _blocks(module, self.variant.checkpoint)

    def _input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (new := self._converted(value)) is value:
            return value
        if value.grad_fn is None:
            self.given.append(weakref.ref(value))
        return new

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float32 and self.dtype is not None:
            tensor = tensor.to(self.dtype)
        if self.variant.channels_last and tensor.dim() == 4 and tensor.is_floating_point():
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _convert_inputs(self) -> None:
        """Inputs that outlive the step were made before it: they are converted once, and not in each step."""
        if self.dtype is None and not self.variant.channels_last:
            return
        gc.collect()
        for tensor in (t for ref in self.given if (t := ref()) is not None):
            if not tensor.requires_grad and (new := self._converted(tensor)) is not tensor:
                torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
        self.given = []

    # ---- optimizers

    def _optimizer_init(self) -> Any:
        begin = Optimizer.__init__

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._see_all()  # a model is converted before its optimizer is made
            begin(optimizer, *args, **kwargs)
            self.optimizers.append(optimizer)

        return init

    def _form(self, kind: type[Optimizer]) -> Any:
        """A constructor of one kind of optimizer that takes the variant's options for those it is given."""
        begin = kind.__init__
        signature = inspect.signature(begin)
        wanted = FORMS.get(self.variant.optimizer, {}) | ({"capturable": True} if self.variant.capturable else {})

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(optimizer, *args, **kwargs)
            now = given.arguments
            self.forms.setdefault(id(optimizer), (now.get("fused"), now.get("foreach")))
            if "fused" in wanted and "fused" in signature.parameters:
                now |= {k: v for k, v in wanted.items() if k in signature.parameters and k != "capturable"}
            elif not now.get("fused"):
                now |= {k: v for k, v in wanted.items() if k in signature.parameters}
            begin(*given.args, **given.kwargs)

        return init

    def _sparse_is_not_fused(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        for group in optimizer.param_groups:
            if group.get("fused") and any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
                group["fused"], group["foreach"] = self.forms.get(id(optimizer), (None, None))

    # ---- passes: autocast, microbatches

    def _run_backward(self) -> Any:
        backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.in_backward:  # a reentrant checkpoint's
                return backward(*args, **kwargs)
            self.in_backward = True
            try:
                with self._off():
                    out = backward(*args, **kwargs)
            finally:
                self.in_backward = False
            self.backwards += 1
            if self.backwards == self.stop_after:
                raise _Stop
            return out

        return run

    def _off(self) -> Any:
        """The forward pass is over: the user's `with torch.autocast` would have ended."""
        if not self.variant.autocast:
            return nullcontext()
        torch.clear_autocast_cache()
        return torch.autocast("cuda", enabled=False)

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        del optimizer
        self.outside.append(self._off())
        self.outside[-1].__enter__()

        def in_closure(closure: Any) -> Any:
            with self._autocast():
                return closure()

        return with_closure(args, kwargs, in_closure)

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self.outside.pop().__exit__(None, None, None)

    def _microbatches(self, step: Step) -> Any:
        """All but the last microbatch end with their backward pass; only the first may set gradients to zero."""
        last = self.stop_after
        for number in range(self.variant.accumulate - 1):
            self.backwards, self.stop_after, self.keeps_gradients = 0, last, number > 0
            try:
                with self._no_updates():
                    step()
            except _Stop:
                pass
        self.stop_after, self.keeps_gradients = -1, True
        try:
            return step()
        finally:
            self.stop_after, self.keeps_gradients = last, False

    @contextmanager
    def _no_updates(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(fake_device.patched(optimizer, "step", lambda *_, **__: None))
            yield

    def _zero_grad(self, owner: Any) -> Any:
        zero = owner.zero_grad

        def run(*args: Any, **kwargs: Any) -> None:
            if not self.keeps_gradients:
                zero(*args, **kwargs)

        return run


def _no_autocast() -> Any:
    begin = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._enabled = False

    return init


def _keeps_activations() -> bool:
    """Whether a module that runs now keeps activations for the backward pass: no checkpoint is around it already."""
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _blocks(root: nn.Module, pattern: str) -> set[int]:
    """The outermost modules whose name matches; of containers that run nothing themselves, what they hold."""
    modules = {name: m for name, m in root.named_modules() if name}
    names = _matching(modules, pattern) if pattern else _repeated(modules)
    names = [n for n in names if not any(n.startswith(f"{outer}.") for outer in names)]
    return {id(m) for name in names for m in _running(modules[name])}


def _running(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _running(child)
    else:
        yield module


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    try:
        wanted = re.compile(pattern)
    except re.error as e:
        raise PresageError(f"{pattern!r} is not a regular expression: {e}") from e
    whole = [n for n in names if wanted.fullmatch(n) or wanted.fullmatch(n.rpartition(".")[2])]
    return whole or [n for n in names if wanted.search(n)]


def _repeated(modules: dict[str, nn.Module]) -> list[str]:
    """Numbered siblings (blocks.0, blocks.1, ...) that hold modules of their own."""
    numbered = [n for n, m in modules.items() if n.rpartition(".")[2].isdecimal() and any(True for _ in m.children())]
    families = [n.rpartition(".")[0] for n in numbered]
    return [n for n, family in zip(numbered, families, strict=True) if families.count(family) > 1]


def _no_blocks(pattern: str) -> None:
    if pattern:
        raise NotApplicable(f"no module called {pattern}")
    raise NotApplicable("no repeated blocks: no numbered modules that hold others")
