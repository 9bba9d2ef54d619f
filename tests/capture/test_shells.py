"""Captures do without PyTorch's compiler, and whoever needs it in the middle of one gets the real thing."""

from __future__ import annotations

import subprocess
import sys

CAPTURED = """
import sys
import torch
from presage.capture import capture

def build(device, compiler=False):
    model = torch.nn.Linear(8, 8, device=device)
    if compiler:
        from torch._dynamo import utils
        assert torch._dynamo.config.suppress_errors is False and utils.counters is not None
    return lambda: model(torch.ones(4, 8, device=device)).sum().backward()

plain = capture(build)
assert "torch._dynamo.symbolic_convert" not in sys.modules
assert [op.name for op in capture(build, {"compiler": True}).ops] == [op.name for op in plain.ops]
assert "torch._dynamo.symbolic_convert" in sys.modules
"""


def test_a_capture_loads_no_compiler_until_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", CAPTURED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
