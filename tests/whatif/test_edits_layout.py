"""Channels-last as an edit, against captures of the same model in that layout; and layouts of views."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edited_models import agree, captured, different, pictures, tokens  # noqa: E402
from presage.graph.graph import Tensor  # noqa: E402
from presage.whatif.edits import NotApplicable, autocast, channels_last  # noqa: E402
from presage.whatif.edits.memory_layout import channels_last as strides_last  # noqa: E402
from presage.whatif.edits.memory_layout import contiguous, dense, is_channels_last, is_dense, moved, viewed  # noqa: E402
from presage.whatif.edits.rewriting.strides import iterated  # noqa: E402

LAST = ("last", True)


@pytest.mark.parametrize("dtype", [(), (("tf32", True),), (("amp", "bfloat16"),), (("dtype", "bfloat16"),)])
def test_channels_last_is_what_the_layout_does(dtype: Any) -> None:
    edited, anew = channels_last(captured(pictures, *dtype)), captured(pictures, *dtype, LAST)
    assert not different(edited, anew)
    agree(edited, anew, memory=0.05)


def test_convolutions_are_given_channels_last() -> None:
    edited = channels_last(captured(pictures))
    convolutions = [op for op in edited.ops if "convolution" in op.name]
    assert convolutions and all(is_channels_last(edited.inputs_of(op)[1]) for op in convolutions)
    assert not [op for op in edited.ops if op.name == "aten::_conv_depthwise2d"]


def test_layout_and_precision_in_either_order() -> None:
    base = captured(pictures)
    one, other = autocast()(channels_last(base)), channels_last(autocast()(base))
    anew = captured(pictures, ("amp", "bfloat16"), LAST)
    for graph in (one, other):
        agree(graph, anew, gpu=0.02, memory=0.05)
    assert sum(different(one, other).values()) <= 2  # a gradient that is cast before or after it is added up


def test_nothing_to_turn() -> None:
    with pytest.raises(NotApplicable, match="already"):
        channels_last(channels_last(captured(pictures)))
    with pytest.raises(NotApplicable, match="no convolution"):
        channels_last(captured(tokens))


def _like(t: Any, offset: int = 0) -> Tensor:
    return Tensor(0, 0, tuple(t.shape), tuple(t.stride()), "float32", offset + t.storage_offset())


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.permute(0, 2, 3, 1),
        lambda t: t[:, 2:4],
        lambda t: t[1:, :, 1],
        lambda t: t.view(2, 2, 4, 5, 6),
        lambda t: t.unsqueeze(1).expand(2, 3, 8, 5, 6),
        lambda t: t.flatten(2),
    ],
)
def test_a_view_lies_where_the_whole_now_does(view: Any) -> None:
    """The same view of the same picture in the other layout, as torch lays it; none where torch has none."""
    old = torch.empty(2, 8, 5, 6)
    new = old.to(memory_format=torch.channels_last)
    found = moved(_like(view(old)), _like(old), _like(new))
    wanted = view(new)
    assert found is not None
    sizes = zip(wanted.shape, wanted.stride(), found.strides, strict=True)
    assert all(a == b for n, a, b in sizes if n > 1) and found.offset == wanted.storage_offset()


def test_a_view_that_is_none_any_more() -> None:
    old = torch.empty(2, 8, 5, 6)
    new = old.to(memory_format=torch.channels_last)
    assert moved(_like(old.view(2, -1)), _like(old), _like(new)) is None


@pytest.mark.parametrize("shape", [(4, 30), (2, 2, 30), (120,), (2, 60), (2, 4, 15), (1, 4, 1, 30)])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_reshapes_as_torch_views_them(shape: Any, order: Any) -> None:
    t = torch.empty(4, 5, 6).permute(*order)
    try:
        wanted = t.view(shape).stride()
    except RuntimeError:
        wanted = None
    assert viewed(_like(t), shape) == wanted


def test_results_of_mixed_layouts_as_torch_lays_them() -> None:
    plain, last = torch.empty(2, 8, 5, 6), torch.empty(2, 8, 5, 6).to(memory_format=torch.channels_last)
    row, column = torch.empty(6), torch.empty(8, 1, 1)
    for inputs in ((plain, last), (last, plain), (last, row), (column, last), (plain[:, ::2], last[:, ::2])):
        wanted = inputs[0] + inputs[1]
        assert iterated(wanted.shape, [_like(t) for t in inputs]) == wanted.stride()


def test_names_of_layouts() -> None:
    shape = (2, 8, 5, 6)
    last = torch.empty(shape).to(memory_format=torch.channels_last)
    assert strides_last(shape) == last.stride() and contiguous(shape) == torch.empty(shape).stride()
    assert is_channels_last(_like(last)) and not is_channels_last(_like(torch.empty(shape)))
    assert is_dense(_like(last)) and not is_dense(_like(last[:, ::2]))
    for t in (last[:, ::2], last.permute(1, 0, 2, 3), last[:, :1].expand(shape)):
        assert dense(_like(t)) == torch.empty_like(t).stride()
