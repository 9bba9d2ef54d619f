"""Hugging Face models from configs alone, no weights and no network: their training steps capture and hold together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from small_models import MODELS

torch = pytest.importorskip("torch", reason="capturing needs torch: pip install 'presage[torch]'")
transformers = pytest.importorskip("transformers", reason="these models come from transformers")

from presage.capture import capture, load_cases  # noqa: E402
from presage.graph.graph import check  # noqa: E402
from presage.graph.work import total  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


OTHERS = ("t5", "mixtral", "qwen2", "gemma", "neox", "opt", "roberta", "distilbert", "whisper", "wav2vec2", "swin")


def sound(graph) -> None:
    """A graph that is consistent, has all three phases, and does twice the matrix work backward as forward."""
    check(graph)
    assert {"forward", "backward", "optimizer"} <= {op.phase for op in graph.ops}
    forward, backward = (total(graph, [op for op in graph.ops if op.phase == p]).flops for p in ("forward", "backward"))
    assert 1.5 <= backward / forward <= 2.6


@pytest.mark.parametrize("name", MODELS)
def test_well_known_models(name: str) -> None:
    sound(capture(MODELS[name], source=name))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures(kind: str) -> None:
    """Encoder-decoders, mixtures of experts, speech, windowed vision."""
    sound(capture(load_cases(ROOT / "workloads" / "varied.py")[f"hf_{kind}"], source=kind))


@pytest.mark.slow
def test_state_space() -> None:
    cases = load_cases(ROOT / "workloads" / "varied.py")
    graph = capture(cases["hf_mamba"], source="mamba")
    check(graph)
    assert len(graph.ops) > 5000  # its scan is a loop in Python


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_model_of_eight_billion_parameters_needs_little_memory() -> None:
    """Captured in a process of its own; its peak memory stays under a gigabyte.

    The peak is VmHWM, for getrusage's would be that of the process it was forked from.
    """
    code = """
import re, torch, transformers
from presage.capture import capture
def build(device):
    config = transformers.LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, vocab_size=128256)
    with torch.device(device):
        m = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    x = torch.randint(0, 128256, (1, 4096), device=device)
    o = torch.optim.AdamW(m.parameters(), fused=True)
    def step():
        o.zero_grad(); m(input_ids=x, labels=x).loss.backward(); o.step()
    return step
graph = capture(build)
elements = sum(s.nbytes for s in graph.storages if s.role == "parameter") / 2
print(elements, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    parameters, peak = map(float, out.split())
    assert parameters == pytest.approx(8.03e9, rel=0.01)
    assert peak < 1.5e9  # a CUDA build of torch alone holds half of it


def test_after_an_earlier_backward() -> None:
    """Autograd's threads may have been started before: capturing does not depend on them."""
    x = torch.randn(3, requires_grad=True)
    (x * 2).sum().backward()
    assert len(capture(MODELS["bert"]).ops) > 100
    (x * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))


def test_adding_in_a_users_own_backward() -> None:
    """An addition in a custom autograd function is the user's own, also of a number; autograd's sums are in place."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (1 + x) + grad

    def build(device: str):
        w = torch.nn.Parameter(torch.randn(8, 8, device=device))

        def step() -> None:
            w.grad = None
            (Doubled.apply(w) + w.tanh()).sum().backward()

        return step

    backward = [op.name for op in capture(build).ops if op.kernels and op.phase == "backward"]
    assert backward.count("aten::add") >= 2
