"""Kernels that are not PyTorch's own: torch.library ops, Triton kernels, functions of extensions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import presage
from presage.capture import capture, contents, custom_ops
from presage.errors import PresageError
from presage.graph.graph import Graph, Op
from presage.graph.work import bytes_moved, flops
from presage.prediction.machine import kernel_times, machine

_library: Any = torch.library.Library("presage_test", "FRAGMENT")
_library.define("pool(Tensor x) -> Tensor")
_library.define("known(Tensor x) -> Tensor")
torch.library.register_fake("presage_test::known", lambda x: x.new_empty(x.shape), lib=_library)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(custom_ops._registered)
    yield
    custom_ops._registered.clear()
    custom_ops._registered.update(before)


def _calls(name: str) -> Callable[[str], Any]:
    def build(device: str) -> Any:
        x = torch.randn(64, 32, device=device)
        return lambda: getattr(torch.ops.presage_test, name)(x)

    return build


def _only(graph: Graph, name: str) -> Op:
    (op,) = [op for op in graph.ops if op.name == name]
    return op


@torch.library.custom_op("presage_test::product", mutates_args=())
def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    @torch.compile
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x + 1).exp() @ w.T).relu()

    return run(x, w)


@_product.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


_product.register_autograd(
    lambda ctx, grad: (torch.ops.presage_test.product(grad, ctx.saved_tensors[0].T.contiguous()), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),  # noqa: ARG005
)


@torch.library.custom_op("presage_test::on_gpu_alone", mutates_args=())
def _on_gpu_alone(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + torch.from_dlpack(x.__dlpack__())


_on_gpu_alone.register_fake(torch.empty_like)


def test_the_code_of_a_custom_op_is_what_it_runs_apart_from_what_is_compiled_around_it() -> None:
    def build(device: str) -> Any:
        x, w = (torch.randn(512, 512, device=device, requires_grad=True) for _ in range(2))
        model = torch.compile(lambda x: torch.ops.presage_test.product(x * 2, w) * 3)
        return lambda: model(x).sum().backward()

    graph = capture(build)
    assert not [op for op in graph.ops if op.name.startswith("presage_test::")]
    assert [flops(graph, op) for op in graph.ops if op.name == "aten::mm"] == [2 * 512**3] * 2
    assert len({op.compiled for op in graph.ops if op.name == "aten::mm"}) == 2  # and neither is the model's call
    forward = [op.name for op in graph.ops if op.kernels]
    assert forward[:5] == [
        "triton::pointwise", "triton::pointwise", "aten::mm", "triton::pointwise", "triton::pointwise"
    ]  # fmt: skip
    assert not any("register_op" in note for note in graph.notes)


def test_a_custom_op_whose_code_needs_a_real_gpu_is_priced_by_its_bytes() -> None:
    graph = capture(_calls("on_gpu_alone"))
    assert [op.name for op in graph.ops if op.kernels] == ["presage_test::on_gpu_alone"]
    assert any("presage_test::on_gpu_alone" in note and "register_op" in note for note in graph.notes)


def test_an_op_that_does_not_say_what_it_returns_is_refused_with_the_remedy() -> None:
    with pytest.raises(PresageError, match=r"presage_test::pool has no fake implementation.*presage.register_op"):
        capture(_calls("pool"))


def test_a_registered_op_has_the_outputs_and_the_cost_it_was_given() -> None:
    presage.register_op(
        "presage_test::pool",
        cost=lambda x: {"flops": 1e12, "bytes": x.numel() * 4},
        outputs=lambda x: x.new_empty(8, 32),
    )
    graph = capture(_calls("pool"))
    op = _only(graph, "presage_test::pool")
    assert [t.shape for t in graph.outputs_of(op)] == [(8, 32)]
    assert flops(graph, op) == 1e12 and bytes_moved(graph, op).total == 64 * 32 * 4
    assert not [note for note in graph.notes if not note.startswith("the step has no")]
    (time,) = [t for o, t in zip(graph.ops, kernel_times(graph, machine("h200")), strict=True) if o is op]
    assert time.source == "roofline" and 1e12 / 67e12 < time.seconds < 1.0


def test_seconds_are_taken_as_they_are_given() -> None:
    presage.register_op("presage_test::known", cost=lambda _: {"seconds": 0.25})
    graph = capture(_calls("known"))
    times = kernel_times(graph, machine("h200"))
    assert times[graph.ops.index(_only(graph, "presage_test::known"))].seconds == 0.25


def test_an_op_of_unknown_cost_is_priced_by_its_bytes_and_named() -> None:
    graph = capture(_calls("known"))
    assert any("presage_test::known" in note and "register_op" in note for note in graph.notes)


@pytest.mark.parametrize("cost", [3.0, {}, {"time": 1.0}, {"flops": -1.0}, {"seconds": "1"}])
def test_a_cost_that_is_none_is_refused(cost: Any) -> None:
    presage.register_op("presage_test::known", cost=lambda _: cost)
    with pytest.raises(PresageError, match="the cost of presage_test::known is"):
        capture(_calls("known"))


def test_a_function_of_an_extension_is_recorded_where_it_is_registered(monkeypatch: Any) -> None:
    extension: Any = ModuleType("presage_test_extension")
    extension.forward = lambda x: 1 / 0  # noqa: ARG005
    monkeypatch.setitem(sys.modules, "presage_test_extension", extension)
    presage.register_op(
        "presage_test_extension.forward", cost=lambda x: {"bytes": x.numel()}, outputs=lambda x: torch.empty_like(x)
    )

    def build(device: str) -> Any:
        layer, x = nn.Linear(32, 32).to(device), torch.randn(64, 32, device=device)
        return lambda: layer(extension.forward(x)).sum().backward()

    assert _only(capture(build), "presage_test_extension.forward").kernels


ADD = """
@triton.jit
def add(x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y_ptrs = y_ptr + at
    rows = tl.load(index_ptr + at, mask=at < n)
    tl.store(y_ptrs + rows, tl.load(x_ptr + at))
"""


def _kernel() -> Any:
    def add() -> None: ...

    return _Kernel(fn=add, src=ADD, arg_names=("x_ptr", "index_ptr", "y_ptr", "n", "BLOCK"))


class _Kernel(SimpleNamespace):
    __hash__ = object.__hash__


def test_a_triton_kernel_is_priced_by_what_its_code_loads_and_stores() -> None:
    kernel = _kernel()
    loaded, stored = (names - {"BLOCK"} for names in custom_ops._pointers(kernel))  # a number in the addresses
    assert (loaded, stored) == ({"x_ptr", "index_ptr"}, {"y_ptr"})

    def build(device: str) -> Any:
        x, y = torch.randn(1024, device=device), torch.empty(1024, device=device)
        index = torch.zeros(1024, dtype=torch.int64, device=device)

        def step() -> None:
            custom_ops._record_launch(
                contents.current_recorder(), kernel, (x, index, y, 1024), {"BLOCK": 128, "grid": (8,)}
            )
            y.exp()

        return step

    graph = capture(build)
    op = _only(graph, "triton::add")
    assert bytes_moved(graph, op).total == 1024 * (4 + 8 + 4)
    assert [graph.tensors[i].shape for i in op.writes] == [(1024,)] and len(list(graph.inputs_of(op))) == 3
    assert any("triton::add" in note for note in graph.notes)


def test_the_launchers_of_triton_are_replaced_only_while_capturing() -> None:
    kernel = type("JITFunction", (), {"run": lambda _self, *_args, **_kwargs: "launched"})
    tuner = type("Autotuner", (), {"run": lambda _self, *_args, **_kwargs: "tuned"})
    custom_ops._replace_launchers(SimpleNamespace(JITFunction=kernel, Autotuner=tuner))
    assert kernel().run() == "launched" and tuner().run() == "tuned"


def test_flash_attn_is_priced_as_pytorchs_own_flash_attention() -> None:
    library: Any = torch.library.Library("flash_attn", "FRAGMENT")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v, float p, float scale, bool causal) -> Tensor[]")
    library.define(
        "_flash_attn_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, "
        "Tensor(b!) dk, Tensor(c!) dv, float p, float scale, bool causal) -> Tensor"
    )
    fake = torch.library.register_fake
    fake("flash_attn::_flash_attn_forward", lambda q, *_: [q.new_empty(q.shape), q.new_empty(2, 8, 512)], lib=library)
    fake("flash_attn::_flash_attn_backward", lambda _, q, *__: q.new_empty(2, 8, 512), lib=library)

    def build(device: str) -> Any:
        q = torch.randn(2, 512, 8, 64, device=device, dtype=torch.bfloat16)
        grads = [torch.empty_like(q) for _ in range(3)]

        def step() -> None:
            out, lse = torch.ops.flash_attn._flash_attn_forward(q, q, q, 0.0, 0.125, True)
            torch.ops.flash_attn._flash_attn_backward(out, q, q, q, out, lse, *grads, 0.0, 0.125, True)

        return step

    graph = capture(build)
    work = {op.name: flops(graph, op) for op in graph.ops if op.kernels}
    forward = 2 * 2 * 2 * 8 * 512 * 512 * 64
    assert work == {"aten::_flash_attention_forward": forward, "aten::_flash_attention_backward": 5 * forward // 2}
    assert not [note for note in graph.notes if not note.startswith("the step has no")]
    times = kernel_times(graph, machine("h200"))
    assert {t.source for op, t in zip(graph.ops, times, strict=True) if op.kernels} == {"model"}


def test_an_extension_that_needs_a_gpu_is_refused_with_the_remedy() -> None:
    def build(device: str) -> Any:
        del device

        def step() -> None:
            raise RuntimeError("x must be a CUDA tensor")  # as an extension's own check says

        return step

    with pytest.raises(PresageError, match=r"compiled code .* needs a real GPU.*presage.register_op"):
        capture(build)


def test_a_model_without_its_kernels_says_which_path_it_took(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "state_space.py").write_text(
        "try:\n    from mamba_ssm.ops import selective_scan_fn\nexcept ImportError:\n    selective_scan_fn = None\n"
        "import torch\nclass Mixer(torch.nn.Linear):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def build(device: str) -> Any:
        import state_space

        mixer, x = state_space.Mixer(8, 8).to(device), torch.randn(4, 8, device=device)
        return lambda: mixer(x).sum().backward()

    assert any("state_space ran in plain PyTorch, for mamba_ssm is not installed" in n for n in capture(build).notes)


def test_xformers_attention_runs_pytorchs_kernels_and_refuses_other_biases_by_name() -> None:
    masks = SimpleNamespace(LowerTriangularMask=type("LowerTriangularMask", (), {}))
    fmha = SimpleNamespace(memory_efficient_attention=None, attn_bias=masks)
    custom_ops.HOOKED["xformers.ops.fmha"](fmha)

    def build(device: str, bias: Any) -> Callable[[], None]:
        q = torch.randn(2, 64, 4, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        return lambda: fmha.memory_efficient_attention(q, q, q, bias).sum().backward()

    graph = capture(build, {"bias": masks.LowerTriangularMask()})
    assert sum(flops(graph, op) for op in graph.ops) == (2 + 5) * 2 * 2 * 4 * 64 * 64 * 32
    assert any("attention" in op.name for op in graph.ops)
    with pytest.raises(PresageError, match=r"test_custom_ops.py:\d+: xformers' attention with BlockDiagonalMask"):
        capture(build, {"bias": type("BlockDiagonalMask", (), {})()})


def test_a_fused_optimizer_that_is_built_as_it_is_loaded_is_captured_as_pytorchs_own():
    def build(_):
        from torch.utils.cpp_extension import load

        adam = load(name="fused_adam", sources=["multi_tensor_adam.cu"]).multi_tensor_adam
        lists = [[torch.zeros(1 << 20, device="cuda")] for _ in range(4)]
        return lambda: adam(2048, None, lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)

    assert [op.name for op in capture(build).ops if op.kernels] == ["aten::_fused_adamw_"]


@pytest.mark.parametrize(("name", "sources"), [("mine", ["mine.cpp", "mine.cu"]), ("cpu_adam", ["cpu_adam.cpp"])])
def test_code_that_is_built_as_it_is_loaded_is_refused_by_name(name, sources):
    def build(_):
        from torch.utils.cpp_extension import load

        return load(name=name, sources=sources).run

    with pytest.raises(PresageError, match=rf"test_custom_ops.py:\d+: {name}.* not captured: "):
        capture(build)
