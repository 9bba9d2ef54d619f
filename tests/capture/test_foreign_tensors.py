"""Tensors of other classes: what they do to the tensors inside them is the step."""

import torch
from torch import nn

from part_models import trained
from presage.capture import capture
from presage.graph import summary


def products(graph):
    return [op.name for op in graph.ops if op.kernels and op.name in ("aten::mm", "aten::addmm")]


def two_layers(device):
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)


def test_a_jagged_batch_is_multiplied_by_the_rows_it_has():
    def build(device):
        rows = [torch.randn(n, 64) for n in (10, 20)]
        batch = torch.nested.nested_tensor(rows, layout=torch.jagged).to(device)
        model = two_layers(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            model(batch).values().sum().backward()
            optimizer.step()

        return step

    graph = capture(build)
    assert len(products(graph)) == 5
    assert summary.total(graph).flops == 5 * 2 * 30 * 64 * 64


def test_a_tensor_class_of_the_users_stays_one():
    class Image(torch.Tensor):
        pass

    def build(device):
        batch = torch.randn(32, 64, device=device).as_subclass(Image)
        assert isinstance(batch + 1, Image)
        return trained(two_layers(device), batch)

    assert len(products(capture(build))) == 5


def test_a_parameter_moved_by_its_data_is_on_the_gpu():
    def build(device):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048))
        for p in model.parameters():
            p.data = p.data.to(device)
        assert all(p.is_cuda and isinstance(p, nn.Parameter) for p in model.parameters())
        return trained(model, torch.randn(32, 64, device=device))

    assert len(products(capture(build))) == 5
