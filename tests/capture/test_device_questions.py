"""What code asks the GPU about itself is answered for the GPU that is predicted."""

import copy
import pickle
import subprocess

import pytest
import torch
from torch import nn

from part_models import trained
from presage.capture import capture
from presage.capture.variants import Variant
from presage.errors import PresageError


def layers(n, device="cuda"):
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(n)]).to(device)


def products(graph):
    return sum(op.name in ("aten::mm", "aten::addmm") for op in graph.ops if op.kernels)


@pytest.mark.parametrize(("gpu", "depth"), [("v100_16gb", 2), ("a100_80gb", 2), ("h100_sxm", 4)])
def test_a_branch_on_the_capability_is_that_of_the_gpu(gpu, depth):
    def build(device):
        hopper = torch.cuda.get_device_capability() >= (9, 0)
        return trained(layers(4 if hopper else 2), torch.randn(32, 64, device=device))

    assert products(capture(build, variant=Variant(gpu=gpu))) == 3 * depth - 1


def test_nvidia_smi_answers_for_the_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = []

    def build(device):
        done = subprocess.run(["nvidia-smi"], stdout=subprocess.PIPE, text=True, check=True)
        said.append(done.stdout.strip())
        return trained(layers(2), torch.randn(32, 64, device=device))

    capture(build, variant=Variant(gpu="v100_16gb"))
    assert said == ["Tesla V100-SXM2-16GB"]


def test_names_memory_and_bfloat16_are_those_of_the_gpu():
    def build(device):
        assert torch.cuda.get_device_name() == "Tesla V100-SXM2-16GB"
        assert not torch.cuda.is_bf16_supported()
        assert 15 << 30 < torch.cuda.get_device_properties(0).total_memory <= 16 << 30
        assert str(torch.accelerator.current_accelerator()) == "cuda"
        return trained(layers(2), torch.randn(32, 64, device=device))

    capture(build, variant=Variant(gpu="v100_16gb"))


def test_allocated_memory_is_what_lives():
    def build(device):
        before = torch.cuda.memory_allocated()
        x = torch.empty(1 << 20, device=device)
        assert torch.cuda.memory_allocated() - before == 4 << 20
        del x
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 4 << 20
        free, total = torch.cuda.mem_get_info()
        assert free == total - before
        return trained(layers(2), torch.randn(32, 64, device=device))

    capture(build)


@pytest.mark.parametrize("place", [lambda m: m.to("cuda:1"), lambda m: m.cuda(1), lambda m: m.to(1)])
def test_a_second_gpu_is_refused_by_its_line(place):
    def build(device):
        return trained(place(layers(1, "cpu")), torch.randn(32, 64, device=device))

    with pytest.raises(PresageError, match=r"test_device_questions.py:\d+: cuda:1 is a second GPU"):
        capture(build)


def test_models_on_the_gpu_are_saved_loaded_pickled_and_copied(tmp_path):
    def build(device):
        model, file = pickle.loads(pickle.dumps(copy.deepcopy(layers(2)))), tmp_path / "model.pt"
        torch.save(model.state_dict(), file)
        model.load_state_dict(torch.load(file, map_location=device))
        return trained(model, torch.randn(32, 64, device=device))

    assert products(capture(build)) == 5
    assert not list(tmp_path.iterdir())


def test_a_search_for_a_batch_size_runs_out_of_memory_where_the_gpu_would():
    found = []

    def build(device):
        model, rows = layers(2), 1 << 30
        while True:
            try:
                model(torch.randn(rows, 64, device=device)).sum().backward()
                break
            except torch.cuda.OutOfMemoryError:
                rows //= 2
        found.append(rows)
        return trained(model, torch.randn(32, 64, device=device))

    for gpu in ("v100_16gb", "h200"):
        capture(build, variant=Variant(gpu=gpu))
    assert found[0] * 8 == found[1] < 1 << 30


def test_a_step_that_is_not_ready_for_it_goes_on_where_it_does_not_fit():
    assert products(capture(lambda device: trained(layers(2), torch.randn(1 << 26, 64, device=device)))) == 5
