"""Predictions of a function and of a model with a batch: what people have at hand in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import presage as ps  # noqa: E402
from presage.capture.model_step import ModelStep, shape_copy  # noqa: E402

BATCH = torch.zeros(32, 64)


class Tied(nn.Module):
    """Tied weights, a buffer, a tensor that is neither, and a dict of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(64))
        self.shift = torch.zeros(64)

    def forward(self, tokens: Any, labels: Any = None) -> Any:
        logits = self.head(self.embed(tokens) * self.scale + self.shift)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def build(device: str, batch: int = 32) -> Callable[[], None]:
    model, x = mlp().to(device), torch.zeros(batch, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).float().mean()
        loss.backward()
        optimizer.step()

    return step


def ops(result: ps.StepResult) -> list[str]:
    return [op.name for op in result.graph.ops]


def _of_code(notes: Sequence[str]) -> list[str]:
    """Notes on what was captured: not the one on the host that is assumed."""
    return [note for note in notes if not note.startswith("host unknown")]


def test_a_model_with_a_batch_is_the_step_a_function_would_build() -> None:
    from_function, from_model = ps.predict(build, draws=3), ps.predict(mlp(), BATCH, draws=3)
    assert ops(from_model) == ops(from_function) and from_model.peak_memory == from_function.peak_memory
    assert from_model.source == "Sequential" and from_model.arguments == {"batch": "32x64"}
    assert from_function.source == "build" and _of_code(from_function.notes) == []


def test_a_function_takes_arguments_and_a_gpu() -> None:
    small, large = (ps.predict(build, gpu="t4", arguments={"batch": b}, draws=3) for b in (32, 65536))
    assert large.gpu_active > 5 * small.gpu_active and "T4" in large.gpu


def test_the_model_is_not_changed() -> None:
    model = mlp()
    before = [(p.data_ptr(), p.clone()) for p in model.parameters()]
    ps.predict(model, BATCH, draws=1)
    assert all(p.data_ptr() == at and torch.equal(p, q) for p, (at, q) in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_a_model_without_memory_is_enough() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 17, 1 << 17)  # 64 GiB of weights
    found = ps.predict(model, torch.zeros(8, 1 << 17), draws=1)
    assert found.peak_memory > 4 * 2**36 and not found.fits


def test_a_copy_keeps_what_is_shared() -> None:
    copy = shape_copy(Tied(), "meta")
    assert copy.head.weight is copy.embed.weight and copy.scale.is_meta and copy.shift.is_meta
    assert [n for n, _ in copy.named_parameters()] == ["embed.weight"]


def test_a_dict_is_keyword_arguments_and_the_loss_the_models_own() -> None:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    found = ps.predict(Tied(), {"tokens": tokens, "labels": tokens}, draws=1)
    assert any("own" in n and "loss" in n for n in found.notes) and "aten::nll_loss_forward" in " ".join(ops(found))
    assert found.arguments == {"tokens": "4x16", "labels": "4x16"}
    pair = ps.predict(Tied(), (tokens, tokens), draws=1)
    assert pair.launches == found.launches


def test_what_was_assumed_is_noted() -> None:
    model = mlp().eval()
    notes = " ".join(ps.predict(model, BATCH, draws=1).notes)
    assert "AdamW" in notes and "mean of the model's output" in notes and "training mode" in notes
    given = {"optimizer": torch.optim.SGD, "loss": lambda output, batch: (output - batch).square().mean()}
    assert _of_code(ps.predict(mlp(), BATCH, draws=1, **given).notes) == []
    assert not model.training


def test_an_optimizer_is_taken_with_its_settings() -> None:
    model = mlp()
    own = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    assert "aten::_fused_adamw_" in ops(ps.predict(model, BATCH, optimizer=own, draws=1))
    assert own.state == {}


def test_ranks_and_edits_take_models_and_functions() -> None:
    step = ps.model_step(nn.Sequential(*(mlp() for _ in range(3))), BATCH)
    assert ps.predict_ranks(step, 4, "fsdp", draws=1).many.ranks == 4  # type: ignore[union-attr]
    assert ps.what_if(step, ["checkpoint", "bf16"], draws=2).edits == ("checkpoint", "bf16")
    assert ps.what_if(build, "batch=64", draws=2).unit


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: ps.predict(mlp()), "give an example batch"),
        (lambda: ps.predict(lambda: None), "should take the device"),
        (lambda: ps.predict(3), "not int"),
        (lambda: ps.predict(build, BATCH), "go with a model"),
        (lambda: ps.predict(mlp(), torch.zeros(3, 5)), "RuntimeError"),
        (lambda: ps.predict(nn.Identity(), BATCH), "no parameters"),
        (lambda: ps.model_step(build, BATCH), "torch.nn.Module"),
        (lambda: ps.predict(build, gpu="h2000"), "did you mean"),
    ],
)
def test_mistakes_are_one_sentence(wrong: Callable[[], Any], text: str) -> None:
    with pytest.raises(ps.PresageError, match=text) as e:
        wrong()
    assert "\n" not in str(e.value)


def test_a_gpu_by_position_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="gpu=gpu"):
        assert "T4" in ps.predict(build, "t4", draws=1).gpu


def test_a_builder_can_be_captured_directly() -> None:
    from presage.capture import capture

    assert capture(ModelStep(mlp(), BATCH)).ops
