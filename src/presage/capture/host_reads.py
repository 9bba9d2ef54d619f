"""What the host reads from the fake GPU: single numbers, copies, and sizes that depend on numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from presage.capture.assumptions import Assumptions
from presage.capture.backend import CUDA
from presage.capture.call_sites import CallSites
from presage.capture.calls import RecordedCall
from presage.capture.contents import is_pinned, leaves, mapped, pin, tensors_in, unprofiled
from presage.capture.op_schema import REAL_ELEMENTS, is_real, on_gpu, signature_of
from presage.capture.tensor_values import TensorValues
from presage.capture.value_ops import SHAPE_GIVERS
from presage.errors import PresageError
from presage.graph.graph import STAGED

aten = torch.ops.aten


class HostReads:
    """Answers with numbers that are known, and with assumed ones where they are not."""

    def __init__(self, fake: FakeTensorMode, values: TensorValues, assumptions: Assumptions, places: CallSites) -> None:
        self.fake, self.values, self.assumptions, self.places = fake, values, assumptions, places
        self.recording = False

    def sized(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op returns whose output's size, or value, depends on its inputs' numbers: it runs on the host."""
        found = []
        needed = SHAPE_GIVERS.get(signature_of(func).name)

        def real(place: int, x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return torch.device("cpu") if isinstance(x, torch.device) else x
            if needed is not None and place not in needed:
                return torch.zeros((), dtype=x.dtype).expand(x.shape)
            numbers = self.values.numbers(x)
            if numbers is None:
                raise PresageError(
                    f"{self.places.line() or 'the step'}: the size of what {func._schema.name} returns is set by the "
                    f"numbers of {x.numel():,} elements, which are not known; give it a fixed size for the capture "
                    "(a mask, or padding)"
                )
            found.append(numbers)
            return numbers.data

        host = [mapped(partial(real, i), a) for i, a in enumerate(args)]
        options = {k: mapped(partial(real, -1), v) for k, v in kwargs.items()}
        with torch.no_grad(), unprofiled():
            out = func(*host, **options)
        if func is aten._pack_padded_sequence.default:
            return self._as_fake(out[0]), out[1]  # the sizes of its batches stay on the host
        if any(n.assumed for n in found):
            shapes = [list(x.shape) for x in leaves(out) if isinstance(x, torch.Tensor)]
            what = f"the size of {func._schema.name}" if shapes else f"what {func._schema.name} says"
            answer = self.assume(what, ", ".join(map(str, shapes)) if shapes else out)
            out = out if shapes else answer
        return self._as_fake(out) if any(on_gpu(x) for x in tensors_in(args, kwargs)) else out

    def _as_fake(self, out: Any) -> Any:
        """Real host tensors as tensors of the same sizes on the fake GPU."""

        def fake(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)

        with self.fake:
            made = mapped(fake, out)
        return tuple(made) if isinstance(out, tuple) else made

    def assume(self, what: str, value: Any) -> Any:
        """A value that is not known is read here."""
        line, frames = self.places.reader()
        value = self.assumptions.read(line, what, value)
        if self.recording:
            self.assumptions.follow(frames)
        return value

    def value(self, tensor: torch.Tensor) -> Any:
        """A single number, as Python's."""
        numbers = self.values.numbers(tensor)
        value = torch.ones((), dtype=tensor.dtype).item() if numbers is None else numbers.data.item()
        if numbers is not None and not numbers.assumed:
            return value
        return self.assume("a truth value" if isinstance(value, bool) else "a number", value)

    def numpy(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        """In the place of Tensor.numpy, of a host tensor too large to hold real numbers."""
        if on_gpu(tensor) and not force:
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() first.")
        with torch.utils._python_dispatch._disable_current_modes():  # it comes past the recorder, not through it
            numbers = self.values.numbers(tensor)
            data = torch.zeros(tensor.shape, dtype=tensor.dtype) if numbers is None else numbers.data.clone()
            known = self.values.is_new(tensor) if numbers is None else not numbers.assumed
            if known and not on_gpu(tensor):
                self.values.share(tensor, data)
        if not known:
            kind = "0" if numbers is None else "drawn at random"
            self.assume("a tensor copied to the host", f"{tensor.dtype} {list(tensor.shape)} {kind}")
        return data.numpy()

    def copied_over(self, func: Any, args: Any, kwargs: Any, given: Any, out: Any, call: RecordedCall | None) -> Any:
        """A copy between the GPU and the host; to the host it brings the numbers, where they are known."""
        source = args[0] if func is aten._to_copy.default else args[1]
        if not isinstance(source, torch.Tensor) or on_gpu(source) == on_gpu(out):
            return out
        target = given[0][0] if func is aten.copy_.default else None
        at_once = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if call:
            call.sync = not at_once or not _goes_on(source, args[0] if target is not None else None)
        if on_gpu(out):
            return out
        brought = self._brought(source, target, out)
        return pin(brought) if at_once and target is None else brought  # as PyTorch makes them

    def _brought(self, source: torch.Tensor, target: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """The numbers of a copy to the host, where they are known."""
        if out.numel() > REAL_ELEMENTS or (target is not None and not is_real(target)):
            return out
        numbers = self.values.numbers(source)
        if numbers is None:
            return out
        if numbers.assumed:
            self.assume("a tensor copied to the host", f"{source.dtype} {list(source.shape)} drawn at random")
        with torch.no_grad(), unprofiled():
            if target is None:
                return numbers.data.to(out.dtype).clone()
            return target.copy_(numbers.data)


def _goes_on(source: torch.Tensor, target: torch.Tensor | None) -> bool:
    """Whether the host goes on at once with a copy it was told not to wait for. Measured on an H200: always with pinned
    memory; with pageable memory where the driver can take all of it over first, never on the way to the host."""
    if on_gpu(source):
        return target is None or is_pinned(target)
    return is_pinned(source) or source.numel() * source.element_size() <= STAGED
