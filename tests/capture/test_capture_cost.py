"""What each op of a capture costs, in counts that do not depend on the machine."""

import pytest

torch = pytest.importorskip("torch")

from presage.capture import capture, recorder  # noqa: E402
from presage.capture.contents import per_op  # noqa: E402

OPS = 100


def _chain(device):
    weight = torch.randn(512, 512, device=device, requires_grad=True)

    def step():
        x = torch.ones(512, 512, device=device)
        for _ in range(OPS):
            x = x * weight
        x.sum().backward()

    return step


def test_ops_of_a_loop_ask_for_their_tensors_devices_a_few_times_each(monkeypatch):
    asked = []
    dispatch = recorder.Recorder.__torch_dispatch__

    def counting(self, func, types, args=(), kwargs=None):
        asked.append(func is torch.ops.prim.device.default)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(recorder.Recorder, "__torch_dispatch__", counting)
    graph = capture(_chain)
    assert sum(op.name == "aten::mul" for op in graph.ops) == 3 * OPS - 1
    assert sum(asked) < 2.5 * (len(asked) - sum(asked))


def test_the_recorder_does_not_switch_a_compiler_off_around_each_op():
    assert not hasattr(recorder.Recorder.__torch_dispatch__, "__wrapped__")


def test_what_is_asked_about_an_op_is_asked_once():
    asked = []
    name = per_op(lambda op: asked.append(op) or op.__name__)
    assert {name(torch.ops.aten.mul.Tensor) for _ in range(3)} == {name(torch.ops.aten.mul.Tensor)}
    assert len(asked) == 1
