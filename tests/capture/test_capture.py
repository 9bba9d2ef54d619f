"""Hand-made steps, one for each thing a capture must see as a GPU would run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from presage.capture import capture, load, load_cases  # noqa: E402
from presage.capture.backend import SUPPORTED, check_torch  # noqa: E402
from presage.errors import InputError, PresageError  # noqa: E402
from presage.graph.graph import Graph, Op, Ref  # noqa: E402


def captured(loss: Callable[[Any], Callable[[], Any]], **kwargs: Any) -> Graph:
    """The graph of a step that runs `loss(device)()` and its backward."""

    def build(device: Any) -> Callable[[], Any]:
        run = loss(device)
        return lambda: run().backward()

    return capture(build, warm_up=0, **kwargs)  # gradients would add up from step to step


def names(graph: Graph, phase: str | None = None) -> list[str]:
    return [o.name.removeprefix("aten::") for o in graph.ops if o.kernels and phase in (None, o.phase)]


def ops(graph: Graph, name: str) -> list[Op]:
    return [o for o in graph.ops if o.name == f"aten::{name}" and o.kernels]


def dtypes(graph: Graph, op: Op) -> list[str]:
    return [t.dtype for t in graph.inputs_of(op)]


def linear_loss(device: Any) -> Callable[[], Any]:
    model, x = nn.Linear(8, 4, device=device), torch.randn(2, 8, device=device)
    return lambda: model(x).sum()


def test_a_linear_layer_forward_and_backward() -> None:
    graph = captured(linear_loss)
    assert names(graph, "forward") == ["addmm", "sum", "fill_"]
    assert names(graph, "backward") == ["mm", "sum"]
    addmm = ops(graph, "addmm")[0]
    assert [t.shape for t in graph.inputs_of(addmm)] == [(4,), (2, 8), (8, 4)]
    assert addmm.within == ("aten::linear",) and addmm.thread == "main" and addmm.line.startswith("test_capture.py:")
    mm = ops(graph, "mm")[0]
    assert mm.thread == "autograd" and mm.sequence == addmm.sequence
    assert mm.within == ("autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0")


def test_backward_ops_belong_to_the_module_of_their_forward() -> None:
    class Two(nn.Module):
        def __init__(self, device: Any) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8, device=device), nn.Linear(8, 1, device=device)

        def forward(self, x: Any) -> Any:
            return self.two(torch.relu(self.one(x)))

    def loss(device: Any) -> Callable[[], Any]:
        model, x = Two(device), torch.randn(2, 8, device=device)
        return lambda: model(x).sum()

    graph = captured(loss)
    assert [o.module for o in ops(graph, "addmm")] == ["one", "two"]
    assert [o.module for o in ops(graph, "mm")] == ["two", "two", "one"]


def test_autocast_casts_and_keeps_the_weights_cast() -> None:
    def loss(device: Any) -> Callable[[], Any]:
        model, x = nn.Linear(8, 8, device=device), torch.randn(2, 8, device=device)

        def run() -> Any:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = model(model(x))
                return F.softmax(y, -1).sum()

        return run

    graph = captured(loss)
    casts = [graph.inputs_of(o)[0].shape for o in ops(graph, "copy_") if o.phase == "forward"]
    # bias, weight and input of the first layer; the second's weights are kept; the softmax runs in float32
    assert casts == [(8,), (8, 8), (2, 8), (2, 8)]
    assert dtypes(graph, ops(graph, "addmm")[0]) == ["bfloat16"] * 3
    assert graph.outputs_of(ops(graph, "_softmax")[0])[0].dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "depth", "mask", "expected"),
    [
        ("bfloat16", 64, None, "_cudnn_attention_forward"),
        ("float16", 128, "bool", "_cudnn_attention_forward"),
        ("float32", 64, None, "_efficient_attention_forward"),
        ("float32", 64, "bool", "_efficient_attention_forward"),
        ("bfloat16", 30, None, "_flash_attention_forward"),
        ("float64", 64, None, "bmm"),
    ],
)
def test_attention_runs_what_an_h200_chooses(dtype: str, depth: int, mask: str | None, expected: str) -> None:
    def loss(device: Any) -> Callable[[], Any]:
        kind = getattr(torch, dtype)
        q, k, v = (torch.randn(2, 4, 32, depth, device=device, dtype=kind, requires_grad=True) for _ in range(3))
        keep = torch.ones(32, 32, device=device, dtype=torch.bool) if mask else None
        return lambda: F.scaled_dot_product_attention(q, k, v, keep).float().sum()

    found = names(captured(loss), "forward")
    assert (
        expected in found or expected.replace("_flash", "_scaled_dot_product_flash").removesuffix("_forward") in found
    )


def test_checkpointing_runs_the_forward_again_in_the_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(device: Any) -> Callable[[], Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(device)
        x = torch.randn(2, 8, device=device)
        return lambda: checkpoint(model, x, use_reentrant=False).sum()

    graph = captured(loss)
    assert [o.phase for o in ops(graph, "addmm")] == ["forward", "backward"]
    assert ops(graph, "addmm")[1].module == "0"


def test_channels_last_stays_channels_last() -> None:
    def loss(device: Any) -> Callable[[], Any]:
        model = nn.Sequential(nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)).to(device)
        model = model.to(memory_format=torch.channels_last)
        x = torch.randn(2, 8, 10, 10, device=device).to(memory_format=torch.channels_last)
        return lambda: model(x).sum()

    graph = captured(loss)
    conv, norm = ops(graph, "cudnn_convolution")[0], ops(graph, "cudnn_batch_norm")[0]
    assert [t.strides[1] for t in graph.inputs_of(conv)] == [1, 1]
    assert graph.inputs_of(norm)[0].strides[1] == 1
    assert conv.within == ("aten::conv2d", "aten::convolution", "aten::_convolution")


def test_convolutions_take_cudnn_or_the_depthwise_kernel() -> None:
    def loss(device: Any) -> Callable[[], Any]:
        model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1), nn.ConvTranspose2d(4, 2, 2)).to(device)
        x = torch.randn(2, 8, 10, 10, device=device)
        return lambda: model(x).sum()

    found = names(captured(loss), "forward")
    assert found[:5] == ["_conv_depthwise2d", "cudnn_convolution", "add_", "cudnn_convolution_transpose", "add_"]


def test_batch_norm_in_bfloat16_is_pytorchs_own() -> None:
    def loss(device: Any) -> Callable[[], Any]:
        model = nn.BatchNorm2d(8).to(device)
        x = torch.randn(2, 8, 4, 4, device=device, dtype=torch.bfloat16)
        return lambda: model(x).float().sum()

    assert "native_batch_norm" in names(captured(loss), "forward")


def test_recurrent_layers_are_one_op_each_way() -> None:
    def loss(device: Any) -> Callable[[], Any]:
        model = nn.LSTM(8, 16, 2, batch_first=True).to(device)
        x = torch.randn(4, 10, 8, device=device)
        return lambda: model(x)[0].sum()

    found = names(captured(loss))
    assert found.count("_cudnn_rnn") == found.count("_cudnn_rnn_backward") == 1


def test_one_hot_scatters_into_zeros_as_on_plain_tensors() -> None:
    def build(device: Any) -> Callable[[], Any]:
        classes, weight = torch.zeros(8, dtype=torch.int64, device=device), torch.randn(5, 3, device=device)
        weight.requires_grad_()
        return lambda: (F.one_hot(classes, 5).float() @ weight).sum().backward()

    assert names(capture(build, warm_up=0), "forward")[:3] == ["fill_", "scatter_", "copy_"]


@pytest.mark.parametrize(
    ("product", "backward"),
    [
        (lambda x: x.cumprod(1), ["mul", "eq", "any", "flip", "cumsum", "flip", "div"]),
        (lambda x: x.prod(1), ["eq", "sum", "copy_", "sum", "div", "mul"]),
        (lambda x: x.prod(), ["eq", "nonzero", "div", "mul"]),
    ],
)
def test_the_gradient_of_a_product_is_a_quotient_as_on_plain_tensors(product: Any, backward: list[str]) -> None:
    """And not a loop over the dimension, as on subclasses: eight products here, a hundred times the step of a NeRF."""

    def loss(device: Any) -> Callable[[], Any]:
        x = torch.rand(16, 8, device=device, requires_grad=True)
        return lambda: product(x).sum()

    assert [n for n in names(captured(loss), "backward") if n in backward] == backward


@pytest.mark.parametrize("find", [torch.nonzero, lambda mask: mask.float()[mask]])
def test_finding_nothing_takes_a_search_and_a_wait(find: Any) -> None:
    def loss(device: Any) -> Callable[[], Any]:
        x = torch.zeros(16, 8, device=device, requires_grad=True)
        return lambda: (find(x > 1), x.sum())[1]

    assert [o.sync for o in ops(captured(loss), "nonzero")] == [True]


def test_a_sparse_gradient_is_added_row_by_row() -> None:
    def build(device: Any) -> Callable[[], Any]:
        table = nn.EmbeddingBag(100, 8, sparse=True, mode="sum", device=device)
        rows, bags = torch.randint(0, 100, (20,), device=device), torch.arange(0, 20, 5, device=device)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            table(rows, bags).sum().backward()
            optimizer.step()

        return step

    graph = capture(build)
    (update,) = ops(graph, "index_add_")
    assert [t.shape for t in graph.inputs_of(update)] == [(100, 8), (20,), (20, 8)]
    assert update.phase == "optimizer" and update.within == ("aten::add_", "aten::add")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fused": True}, ["_fused_adamw_"]),
        ({"foreach": True}, ["_foreach_mul_", "_foreach_lerp_"]),
        ({"foreach": False}, ["mul_", "lerp_"]),
        ({}, ["_foreach_mul_"]),
    ],
)
def test_the_forms_of_an_optimizer(options: dict[str, bool], expected: list[str]) -> None:
    graph = capture(lambda device: _trained(device, options))
    found = names(graph, "optimizer")
    assert all(name in found for name in expected)
    roles = {s.role for s in graph.storages}
    assert {"parameter", "gradient", "optimizer"} <= roles


def _trained(device: Any, options: dict[str, bool], scaler: Any = None) -> Callable[[], Any]:
    model, x = nn.Linear(8, 8, device=device), torch.randn(2, 8, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


def test_a_gradient_scaler_unscales_and_steps() -> None:
    graph = capture(lambda device: _trained(device, {}, torch.amp.GradScaler("cuda")))
    found = names(graph)
    assert "_amp_foreach_non_finite_check_and_unscale_" in found and "_amp_update_scale_" in found
    assert "_foreach_lerp_" in found


def test_reading_a_value_is_a_wait() -> None:
    def build(device: Any) -> Callable[[], Any]:
        x = torch.randn(4, device=device)
        return lambda: (x.sum().item(), x.cpu(), torch.cuda.synchronize())

    graph = capture(build)
    assert [o.name for o in graph.ops if o.sync] == ["aten::_local_scalar_dense", "aten::copy_", "cuda::synchronize"]
    assert not graph.assumptions  # all of it is known


def test_cuda_may_be_named_in_many_ways() -> None:
    def build(device: Any) -> Callable[[], Any]:
        assert device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        with torch.device("cuda"):
            model = nn.Linear(8, 8)
        other = nn.Linear(8, 8).cuda()
        generator = torch.Generator(device="cuda").manual_seed(3)
        x = torch.randn(2, 8, generator=generator, device=torch.device("cuda", 0))
        y = torch.randn(2, 8).to("cuda:0")
        assert x.is_cuda and y.device.type == "cuda" and next(other.parameters()).is_cuda

        def step() -> Any:
            with torch.autocast("cuda", dtype=torch.float16):
                assert torch.is_autocast_enabled("cuda")
                return (model(x) + other(y)).sum().backward()

        return step

    assert names(capture(build)).count("addmm") == 2


def test_tied_weights_built_on_the_host_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(300, 300), nn.Linear(300, 300, bias=False)
            self.head.weight = self.table.weight

    def build(device: Any) -> Callable[[], Any]:
        model = Tied().to(device)
        assert model.head.weight is model.table.weight
        x = torch.randint(0, 300, (5,), device=device)
        return lambda: model.head(model.table(x)).sum().backward()

    assert sum(s.nbytes for s in capture(build).storages if s.role == "gradient") == 300 * 300 * 4


def test_an_activation_is_freed_when_its_last_user_has_run() -> None:
    def loss(device: Any) -> Callable[[], Any]:
        w = torch.randn(64, 64, device=device, requires_grad=True)
        x = torch.randn(64, 64, device=device)

        def run() -> Any:
            y = x @ w
            return torch.relu(y).sum()  # relu keeps its output, not y

        return run

    graph = captured(loss)
    product, relu = ops(graph, "mm")[0], ops(graph, "clamp_min")[0]
    storage = graph.tensors[product.outputs[0]].storage
    (freed,) = [e.op for e in graph.events if e.storage == storage and not e.allocates]
    after = graph.ops.index(relu)
    assert after < freed <= next(i for i, o in enumerate(graph.ops) if o.phase == "backward")
    before = {e.storage for e in graph.events if e.allocates}
    inputs = [graph.tensors[a.id].storage for a in product.inputs if isinstance(a, Ref)]
    assert not before & set(inputs)


def test_a_mistake_in_the_users_code_is_told_with_its_line() -> None:
    def build(device: Any) -> Callable[[], Any]:
        raise ValueError(f"no {device}")

    with pytest.raises(PresageError, match=r"test_capture\.py:\d+: ValueError: no cuda"):
        capture(build)


def _state() -> tuple[Any, ...]:
    return (
        torch.cuda.is_available(), torch.backends.cuda.matmul.allow_tf32, torch.get_default_dtype(),
        torch.amp.autocast_mode.autocast.__init__, torch.Generator, torch.is_autocast_enabled("cpu"),
        len(torch.overrides._get_current_function_mode_stack()), torch.Tensor._make_subclass,
        torch.get_rng_state().sum().item(), len(torch.nn.modules.module._global_forward_hooks),
        torch._subclasses.FakeTensor, torch.utils.swap_tensors, torch.randn(3).device.type,
    )  # fmt: skip


def test_nothing_is_left_behind() -> None:
    torch.manual_seed(5)
    before = _state()

    def build(device: Any) -> Callable[[], Any]:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(1)
        return linear_loss(device)

    torch.manual_seed(5)
    graph = capture(build)
    torch.manual_seed(5)
    assert _state() == before
    assert graph.flags["allow_tf32"] is True

    def fails(device: Any) -> Callable[[], Any]:
        run = linear_loss(device)

        def step() -> None:
            run().backward()
            raise RuntimeError("in the step")

        return step

    with pytest.raises(PresageError, match="in the step"):
        capture(fails)
    torch.manual_seed(5)
    assert _state() == before


def test_load_finds_functions_and_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text("def build(device):\n    return lambda: None\n\nCASES = {'one': (build, {})}\n")
    assert callable(load(f"{file}:build")) and list(load_cases(file)) == ["one"]
    with pytest.raises(InputError, match="no function 'other' in it; it has build"):
        load(f"{file}:other")
    with pytest.raises(InputError, match="no such file"):
        load(f"{tmp_path}/none.py:build")
    with pytest.raises(PresageError, match=r"FILE\.py:FUNCTION"):
        load("build")
    file.write_text("x = 1\nraise KeyError('y')\n")
    with pytest.raises(PresageError, match=r"steps\.py:2: KeyError"):
        load(f"{file}:build")


def test_an_unsupported_torch_is_an_error_that_names_the_range() -> None:
    for version in ("2.9.1+cu128", "2.16.0", "3.0.0a0"):
        with pytest.raises(PresageError, match=r"capture needs torch>=2.10,<2.16"):
            check_torch(version)
    check_torch("2.10.0")
    check_torch("2.15.1+cpu")


def test_the_packages_torch_is_the_one_that_capture_accepts() -> None:
    (oldest, above) = (".".join(map(str, v)) for v in SUPPORTED)
    assert f'torch = ["torch>={oldest},<{above}"]' in Path("pyproject.toml").read_text()
