"""Sparse tensors, CUDA's tensor types and lazy modules, captured as people use them."""

import pytest
import torch
from torch import nn

from presage.capture import capture
from presage.errors import PresageError
from presage.graph import summary


def _fit(params, loss, optimizer=torch.optim.AdamW):
    made = optimizer(list(params))

    def step():
        made.zero_grad()
        loss().backward()
        made.step()

    return step


def _adjacency(kind, device, n=50, each=4):
    columns = torch.arange(n * each) % n
    if kind == "coo":
        rows = torch.arange(n).repeat_interleave(each)
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), torch.ones(n * each), (n, n)).to(device)
    ends = torch.arange(0, n * each + 1, each)
    if kind == "csr made on the GPU":
        given = (x.to(device) for x in (ends, columns, torch.ones(n * each)))
        return torch.sparse_csr_tensor(*given, (n, n))
    return torch.sparse_csr_tensor(ends, columns, torch.ones(n * each), (n, n)).to(device)


@pytest.mark.parametrize("kind", ["coo", "csr", "csr made on the GPU"])
def test_a_sparse_product_counts_two_flops_for_each_entry_and_column_both_ways(kind):
    def build(device):
        layer, x, a = nn.Linear(16, 16).to(device), torch.randn(50, 16, device=device), _adjacency(kind, device)
        return _fit(layer.parameters(), lambda: (a @ layer(x)).sum())

    dense, entries = 2 * 2 * 50 * 16 * 16, 2 * 2 * 200 * 16
    assert summary.total(capture(build)).flops == dense + entries


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients_touch_the_rows_that_were_looked_up(optimizer):
    def build(device):
        table, index = nn.Embedding(10_000, 8, sparse=True).to(device), torch.tensor([3, 3, 7, 9]).to(device)
        return _fit(table.parameters(), lambda: table(index).sum(), optimizer)

    graph = capture(build)
    sizes = {graph.tensors[i].shape for op in graph.ops if op.phase == "optimizer" for i in op.outputs}
    assert (3, 8) in sizes  # three distinct rows of the four looked up
    assert graph.assumptions == ()


def test_what_sparse_tensors_cannot_do_is_named():
    def build(device):
        a = _adjacency("coo", device)
        return lambda: torch.sparse.softmax(a, 1)

    with pytest.raises(PresageError, match="works on sparse tensors"):
        capture(build)


def test_cuda_tensor_types_make_convert_and_recognise_tensors():
    def build(_):
        x = torch.cuda.FloatTensor(64, 32).normal_()
        assert isinstance(x, torch.cuda.FloatTensor) and x.type() == "torch.cuda.FloatTensor"
        assert not isinstance(torch.zeros(1), torch.cuda.FloatTensor)
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        half = torch.randn(4).type("torch.cuda.HalfTensor")
        assert half.is_cuda and half.dtype == torch.float16 and torch.zeros(1).type() == "torch.FloatTensor"
        layer = nn.Linear(32, 32).type(torch.cuda.FloatTensor)
        return _fit(layer.parameters(), lambda: layer(x).sum())

    assert summary.total(capture(build)).flops == 2 * 2 * 64 * 32 * 32


def test_a_default_tensor_type_on_the_gpu_builds_there():
    def build(_):
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        layer, x = nn.Linear(32, 32), torch.randn(64, 32)
        return _fit(layer.parameters(), lambda: layer(x).sum())

    assert summary.total(capture(build)).flops == 2 * 2 * 64 * 32 * 32
    assert torch.zeros(1).device.type == "cpu"


def test_a_lazy_module_moved_before_its_first_call_gets_its_sizes_there():
    def build(device):
        model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(4)).to(device)
        x = torch.randn(16, 8, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return _fit(model.parameters(), lambda: model(x).sum(), lambda _: optimizer)

    graph = capture(build)
    parameters = {s.name: s.nbytes for s in graph.storages if s.role == "parameter"}
    assert parameters == {"0.weight": 1024, "0.bias": 128, "2.weight": 512, "2.bias": 16}
