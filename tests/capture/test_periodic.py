"""Scripts whose optimizer does some work once in several steps: the step predicted is the mean one."""

from pathlib import Path

import pytest

from presage.capture.calls import RecordedCall
from presage.capture.periodic import splits_compiled
from presage.capture.script import capture_script
from presage.graph.graph import Graph
from presage.scripts import TrainingScript

SCRIPT = """
import torch

class Whitened(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.number = 0

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["basis"] = torch.linalg.eigh(p.grad @ p.grad.T)[1]
            elif self.number % 20 == 0:
                state["basis"] = torch.linalg.qr(p.grad @ p.grad.T)[0]
            p.add_(state["basis"] @ p.grad, alpha=-0.1)
        self.number += 1

model = torch.nn.Linear(64, 64, bias=False).cuda()
optimizer = Whitened(model.parameters())
for number in range(1000):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number % 5 == 0 and number > 2:
        raise ValueError("the loop's own remainders stay as they are")
"""


def captured(folder: Path, script: str) -> Graph:
    (folder / "train.py").write_text(script)
    return capture_script(TrainingScript(str(folder / "train.py")))


@pytest.mark.parametrize("steps", [2, 20])
def test_what_an_optimizer_does_once_in_several_steps_counts_so_much_less(tmp_path: Path, steps: int) -> None:
    script = SCRIPT.replace("number % 5 == 0", "number % 50 == 0").replace("% 20", f"% {steps}")
    graph = captured(tmp_path, script)
    rare = {op.name for op in graph.ops if op.speed == steps and op.kernels}
    assert rare == {"aten::mm", "aten::linalg_qr"}
    assert any(f"train.py:15: due once in {steps} steps: the" in note for note in graph.notes)
    assert sum(op.speed == 1.0 for op in graph.ops if op.name == "aten::mm") == 3


def test_a_step_that_fails_where_rare_work_is_due_is_predicted_without_it(tmp_path: Path) -> None:
    graph = captured(tmp_path, SCRIPT.replace("torch.linalg.qr(", "self.missing("))
    assert all(op.speed == 1.0 for op in graph.ops)
    assert "aten::linalg_qr" not in {op.name for op in graph.ops}


def test_plain_code_amid_compiled_code_is_noticed() -> None:
    def calls(*compiled: str) -> list[RecordedCall]:
        return [RecordedCall(i, "aten::add", "", host=False, compiled=c) for i, c in enumerate(compiled)]

    assert splits_compiled(calls("f", "", "f"), [1])
    assert not splits_compiled(calls("f", "", "g"), [1])
    assert not splits_compiled(calls("", "", ""), [1])
    assert not splits_compiled(calls("f", "f", ""), [2])
