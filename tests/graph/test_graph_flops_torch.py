"""FLOPs beside torch's FlopCounterMode: every op it has a formula for, forward and backward, on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graph_sketches import Sketch
from presage.graph import work

torch = pytest.importorskip("torch", reason="needs torch: pip install 'presage[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Every op as a line of a Sketch, with what torch's formula says of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sketch = Sketch()
        self.theirs: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        outputs = [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, torch.Tensor)]
        self.sketch.op(
            func._schema.name.removeprefix("aten::"),
            [self.value(v) for v in named.values()],
            [self.value(o) for o in outputs],
            names=" ".join(named),
        )
        formula = flop_registry.get(func._overloadpacket)
        self.theirs.append(formula(*args, **kwargs, out_val=out) if formula else None)
        return out

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.sketch.tensor(*value.shape, dtype=str(value.dtype).removeprefix("torch."))
        if isinstance(value, tuple | list):
            return [self.value(v) for v in value]
        return value if isinstance(value, bool | int | float | str | None) else str(value)


def compare(run: Callable[[], Any]) -> int:
    """Each op's count equals torch's; so does the sum, which is given back."""
    with Recorder() as recorder:
        run()
    graph = recorder.sketch.graph()
    for op, theirs in zip(graph.ops, recorder.theirs, strict=True):
        assert work.flops(graph, op) == (theirs or 0), op.name
    ours = work.total(graph).flops
    with FlopCounterMode(display=False) as counter:
        run()
    assert ours == counter.get_total_flops()
    return ours


def meta(*shape: int, grad: bool = True, dtype: Any = None) -> Any:
    return torch.empty(shape, device="meta", requires_grad=grad, dtype=dtype or torch.float32)


def test_a_transformer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device="meta")
    x = meta(2, 10, 32)
    assert compare(lambda: layer(x).sum().backward()) > 3 * 2 * 20 * (4 * 32 * 32 + 2 * 32 * 64)


def test_convolutions_of_all_kinds() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, device="meta"),
        nn.Conv2d(8, 12, 3, dilation=2, bias=False, device="meta"),
        nn.BatchNorm2d(12, device="meta"),
        nn.ConvTranspose2d(12, 6, 2, stride=2, device="meta"),
        nn.Flatten(2),
        nn.Conv1d(6, 4, 3, device="meta"),
    )
    compare(lambda: model(meta(2, 3, 32, 32, grad=False)).sum().backward())
    compare(lambda: model(meta(2, 3, 32, 32)).sum().backward())
    compare(lambda: F.conv3d(meta(1, 2, 6, 6, 6), meta(4, 2, 3, 3, 3)).sum().backward())


def test_grouped_convolutions_are_exact_where_torch_is_not() -> None:
    """torch counts the weight gradient of a grouped convolution once per pair of groups: `groups` times too often."""
    x, w = meta(2, 8, 10, 10), meta(12, 2, 3, 3)
    with Recorder() as recorder:
        F.conv2d(x, w, groups=4).sum().backward()
    graph = recorder.sketch.graph()
    counts = {op.name: (work.flops(graph, op), n) for op, n in zip(graph.ops, recorder.theirs, strict=True) if n}
    forward, theirs = counts["aten::convolution"]
    assert forward == theirs == 2 * (2 * 12 * 8 * 8) * (2 * 9)
    assert counts["aten::convolution_backward"] == (2 * forward, forward + 4 * forward)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_fused_attention(kv_heads: int) -> None:
    q, k, v = meta(2, 4, 6, 8, grad=False), meta(2, kv_heads, 5, 8, grad=False), meta(2, kv_heads, 5, 16, grad=False)
    compare(lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True))
    half = [t.to(torch.float16) for t in (q, k, v)]
    compare(lambda: aten._scaled_dot_product_flash_attention(*half, 0.0, True))


def test_fused_attention_backward() -> None:
    q = meta(2, 4, 6, 8, grad=False)
    k = v = meta(2, 4, 5, 8, grad=False)
    lse, empty = meta(2, 4, 6, grad=False), meta(0, grad=False)
    seed = meta(dtype=torch.int64, grad=False)
    compare(
        lambda: aten._scaled_dot_product_flash_attention_backward(
            q, q, k, v, q, lse, empty, empty, 6, 5, 0.0, True, seed, seed
        )
    )
    compare(
        lambda: aten._scaled_dot_product_efficient_attention_backward(
            q, q, k, v, None, q, lse, seed, seed, 0.0, [True, True, True, False], True
        )
    )


def test_recurrent_layers_agree_with_their_matrix_products() -> None:
    """torch has no formula for cuDNN's fused layers; on other devices it takes them apart, and counts those parts."""
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        layer = kind(7, 5, num_layers=2, bidirectional=True)
        x = torch.zeros(6, 3, 7)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        s = Sketch()
        weights: list[Any] = [s.tensor(*w.shape) for w in layer.parameters()]
        op = s.op("_cudnn_rnn", [s.tensor(6, 3, 7), weights], [s.new(6, 3, 10)], names="input weight")
        by_hand = 2 * 18 * 2 * gates * 5 * ((7 + 5) + (10 + 5))
        assert work.flops(s.graph(), op) == by_hand
        if kind is not nn.LSTM:  # the CPU's LSTM is fused too, and not counted
            assert counter.get_total_flops() == by_hand


def test_other_products() -> None:
    x, y = meta(3, 4, 5), meta(3, 5, 6)
    compare(lambda: torch.baddbmm(meta(3, 4, 6), x, y).sum().backward())
    compare(lambda: torch.addmm(meta(6), meta(4, 5), meta(5, 6)).sum().backward())
    compare(lambda: torch.einsum("bij,bjk->bik", x, y).sum().backward())
    compare(lambda: F.bilinear(meta(3, 4), meta(3, 5), meta(2, 4, 5)).sum().backward())


def test_every_op_torch_counts_has_a_rule() -> None:
    from presage.graph.work import has_rule

    names = {str(packet).replace("aten.", "aten::") for packet in flop_registry if str(packet).startswith("aten.")}
    assert {n for n in names if not has_rule(n)} == set()
