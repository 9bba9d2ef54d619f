"""Where in the user's program an op comes from: module, line, phase and thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from presage.capture.calls import RecordedCall
from presage.graph.graph import Thread

__all__ = ["CallSites", "host_thread"]

_OURS = str(Path(__file__).parent)
_NO_NUMBER = 1 << 62  # nodes that accumulate gradients have a number above it
_TORCH = str(Path(torch.__file__).parent)


def host_thread() -> Thread:
    """The thread a GPU run would be on: autograd has one of its own, though while capturing it borrows the caller's."""
    return "main" if torch._C._current_autograd_node() is None else "autograd"


class CallSites:
    """Follows modules and optimizers through global hooks, which `following` sets and removes."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.roots: list[torch.nn.Module] = []
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.in_optimizer = False
        self._stacks: dict[Thread, list[str]] = {}
        self._forward: dict[int, tuple[str, str]] = {}  # module and line of the op with that autograd number
        self.before_step: list[Any] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._step_begins),
            optimizer_hooks.register_optimizer_step_post_hook(self._step_ends),
        ]
        with ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            yield

    def forget(self) -> None:
        """A new step: autograd's numbers of the last one mean nothing any more."""
        self._forward.clear()

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        del inputs
        if id(module) not in self.names:
            prefix = type(module).__name__ if self.roots else ""
            self.roots.append(module)
            for name, child in module.named_modules(prefix=prefix):
                self.names.setdefault(id(child), name)
        self._stacks.setdefault(host_thread(), []).append(self.names[id(module)])

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        stack = self._stacks.get(host_thread())
        if stack:
            stack.pop()

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self.in_optimizer = True
        self.optimizers[id(optimizer)] = optimizer
        for listener in self.before_step:
            listener(optimizer)

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self.in_optimizer = False

    def fill(self, call: RecordedCall) -> None:
        """Write down where a call comes from."""
        thread = host_thread()
        stack = self._stacks.get(thread)
        node = torch._C._current_autograd_node()
        call.thread = thread
        if node is not None and not stack:
            number = node._sequence_nr()
            call.sequence = number if number < _NO_NUMBER else -1
            call.module, call.line = self._forward.get(call.sequence, ("", ""))
            call.phase = "backward"
            return
        call.module, call.line = stack[-1] if stack else "", self.line()
        call.phase = self._phase(call.thread == "autograd" or node is not None, bool(stack))
        if torch.is_grad_enabled():
            call.sequence = torch._C._autograd._get_sequence_nr() - 1
            self._forward.setdefault(call.sequence, (call.module, call.line))

    def _phase(self, backward: bool, in_module: bool) -> Any:
        if backward:
            return "backward"
        if self.in_optimizer:
            return "optimizer"
        return "forward" if in_module or torch.is_grad_enabled() else "other"

    def line(self) -> str:
        """The innermost line that is neither PyTorch's nor ours."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith((_TORCH, _OURS, "<")) and "contextlib" not in path:
                return f"{Path(path).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
