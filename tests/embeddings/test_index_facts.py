"""What a capture knows of indices: how many values are distinct, and how often the most frequent one comes."""

from __future__ import annotations

import gzip
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch: pip install torch")

from msgspec.structs import replace  # noqa: E402
from torch import nn  # noqa: E402

from presage.capture import capture  # noqa: E402
from presage.costs.call import from_graph  # noqa: E402
from presage.errors import InputError  # noqa: E402
from presage.graph.builder import select  # noqa: E402
from presage.graph.graph import Graph  # noqa: E402
from presage.graph.save import from_bytes, to_bytes  # noqa: E402

Fact = tuple[int, int]
ROWS, COUNT = 500, 4000


def lookups(make: Callable[[Any], Any], inside: Callable[[Any], Any] = lambda x: x) -> Graph:
    """A step that looks `inside(make(device))` up in a table, both ways."""

    def build(device: Any) -> Callable[[], Any]:
        table, index = nn.Embedding(ROWS, 16, device=device), make(device)
        return lambda: table(inside(index)).sum().backward()

    return capture(build, warm_up=0)


def known(graph: Graph, name: str) -> list[Fact]:
    """Facts the cost models see, of each op of that name."""
    facts = [from_graph(graph, op).facts for op in graph.ops if op.name == f"aten::{name}" and op.kernels]
    return [(int(f["distinct"]), int(f["most"])) for f in facts if f]


def of(values: Any) -> Fact:
    counts = np.unique(np.asarray(values), return_counts=True)[1]
    return len(counts), int(counts.max())


def only(graph: Graph) -> Fact:
    """Both ways must know the same."""
    forward, backward = known(graph, "gather"), known(graph, "embedding_dense_backward")
    assert len(forward) == 1 and forward == backward
    return forward[0]


def skewed(device: Any) -> Any:
    generator = torch.Generator(device=device).manual_seed(3)
    u = torch.rand(COUNT, generator=generator, device=device, dtype=torch.float64)
    return (ROWS**u).long().clamp(1, ROWS) * 7 % ROWS


def test_a_generator_with_a_seed_draws_what_it_draws_on_the_host() -> None:
    assert only(lookups(skewed)) == of(skewed("cpu"))
    assert of(skewed("cpu"))[1] > 10 * COUNT / ROWS  # or there would be nothing to know


def test_uniform_indices() -> None:
    distinct, most = only(lookups(lambda d: torch.randint(0, ROWS, (COUNT,), device=d)))
    assert distinct >= ROWS - 5 and COUNT / ROWS < most < 5 * COUNT / ROWS


def test_a_capture_draws_the_same_each_time_and_leaves_the_hosts_numbers_alone() -> None:
    def make(d: Any) -> Any:
        return torch.randint(0, ROWS, (COUNT,), device=d)

    torch.manual_seed(5)
    after = torch.rand(3)
    torch.manual_seed(5)
    first = lookups(make)
    assert torch.equal(torch.rand(3), after)
    assert lookups(make).facts == first.facts


MADE = {
    "arange": lambda d: torch.arange(100, device=d),
    "arange_mod": lambda d: torch.arange(COUNT, device=d) % 7,
    "full": lambda d: torch.full((90,), 3, device=d),
    "list": lambda d: torch.tensor([1, 1, 1, 2, 5], device=d),
    "numpy": lambda d: torch.from_numpy(np.arange(100_000) % 9).to(d),
    "host": lambda d: (torch.arange(100_000) % 11).to(d),
    "slice": lambda d: torch.from_numpy(np.arange(100).reshape(10, 10) % 10)[:, 3].to(d),
    "int32": lambda d: (torch.arange(100, device=d) % 3).int(),
    "cat": lambda d: torch.cat([torch.arange(10, device=d), torch.zeros(5, dtype=torch.long, device=d)]),
    "sort": lambda d: torch.sort(torch.arange(20, device=d) % 4, descending=True)[0],
    "transpose": lambda d: (torch.arange(60, device=d) % 4).view(6, 10).t().clone(),
    "stride": lambda d: torch.arange(60, device=d).view(6, 10)[:, ::5] // 2,
    "expand": lambda d: torch.arange(8, device=d).expand(5, 8),
    "put": lambda d: torch.zeros(50, dtype=torch.long, device=d).index_fill_(0, torch.arange(9, device=d), 4),
}


@pytest.mark.parametrize("name", MADE)
def test_indices_made_with_plain_ops(name: str) -> None:
    assert only(lookups(MADE[name])) == of(MADE[name]("cpu"))


def test_drawn_from_weights() -> None:
    weights = [0.9] + [0.1 / 99] * 99
    distinct, most = only(
        lookups(lambda d: torch.multinomial(torch.tensor(weights, device=d), COUNT, replacement=True))
    )
    assert most == pytest.approx(0.9 * COUNT, rel=0.05) and 50 < distinct <= 100


def test_filled_in_place() -> None:
    def filled(d: Any) -> Any:
        x = torch.empty(COUNT, dtype=torch.long, device=d).random_(0, 50)
        x[:1000] = 3
        x[1000:].clamp_(max=9)
        return x.add_(1)

    distinct, most = only(lookups(filled))
    assert distinct == 10 and most == pytest.approx(0.8 * 3000, rel=0.1)


def test_views_inside_the_step() -> None:
    def made(d: Any) -> Any:
        return torch.stack([torch.arange(100, device=d) % n for n in (2, 50)], 1)

    assert only(lookups(made, lambda x: x[:, 0])) == (2, 50)
    assert only(lookups(made, lambda x: x[:, 1])) == (50, 2)
    assert only(lookups(made, lambda x: x[:10].t())) == of(made("cpu")[:10])


def test_what_depends_on_the_model_is_not_known() -> None:
    def build(device: Any) -> Callable[[], Any]:
        score, table = nn.Linear(2048, ROWS, device=device), nn.Embedding(ROWS, 16, device=device)
        x = torch.randn(64, 2048, device=device)
        return lambda: table(score(x).argmax(1)).sum().backward()

    assert capture(build, warm_up=0).facts == {}


def test_what_an_unknown_op_wrote_into_is_forgotten() -> None:
    def make(d: Any) -> Any:
        index, scores = torch.arange(64, device=d), torch.randn(64, 2048, device=d) @ torch.randn(2048, 3, device=d)
        return index.copy_(scores.argmax(1))

    assert lookups(make).facts == {}


def test_an_index_that_changes_in_the_step_is_known_as_it_is_used_first() -> None:
    def build(device: Any) -> Callable[[], Any]:
        table, index = nn.Embedding(ROWS, 16, device=device), torch.arange(100, device=device)

        def step() -> None:
            table(index).sum().backward()
            index.zero_()

        return step

    assert only(capture(build, warm_up=0)) == (100, 1)
    assert only(capture(build, warm_up=1)) == (1, 100)


def test_large_tensors_are_left_alone() -> None:
    assert lookups(lambda d: torch.randint(0, ROWS, ((1 << 24) + 1,), device=d)).facts == {}


def test_gather_and_scatter_count_rows_once() -> None:
    def build(device: Any) -> Callable[[], Any]:
        x = torch.randn(50, 8, device=device, requires_grad=True)
        index = (torch.arange(30, device=device) % 6)[:, None].expand(30, 8)
        return lambda: x.gather(0, index).sum().backward()

    graph = capture(build, warm_up=0)
    assert known(graph, "gather") == known(graph, "scatter_add_") == [(6, 5)]


def test_several_indices_at_once_say_nothing_of_each() -> None:
    def build(device: Any) -> Callable[[], Any]:
        x = torch.randn(50, 50, device=device)
        i = torch.zeros(30, dtype=torch.long, device=device)
        return lambda: x[i, torch.arange(30, device=device)]

    assert capture(build, warm_up=0).facts == {}


# ---- in files


def test_facts_are_saved_and_older_files_have_none() -> None:
    graph = lookups(MADE["arange_mod"])
    assert graph.facts and from_bytes(to_bytes(graph)) == graph
    without = replace(graph, facts={})
    older = to_bytes(without).split(b"\n", 1)
    fields = msgspec.msgpack.decode(gzip.decompress(older[1]))
    del fields["facts"]
    data = older[0] + b"\n" + gzip.compress(msgspec.msgpack.encode(fields))
    assert from_bytes(data) == without


@pytest.mark.parametrize(("facts", "problem"), [({10**6: (1, 1)}, "not there"), ({0: (0, 4)}, "0 values are distinct")])
def test_facts_are_checked(facts: dict[int, Fact], problem: str) -> None:
    graph = replace(lookups(MADE["arange"]), facts=facts)
    with pytest.raises(InputError, match=problem):
        from_bytes(to_bytes(graph))


def test_edits_keep_facts_with_their_tensors() -> None:
    graph = lookups(MADE["arange_mod"])
    backward = select(graph, lambda op: op.phase == "backward")
    assert len(backward.tensors) < len(graph.tensors)
    assert known(backward, "embedding_dense_backward") == known(graph, "embedding_dense_backward") == [(7, 572)]


# ---- on measured workloads


@pytest.mark.parametrize("name", ["dlrm_ddp_b4096_l64_zipf", "dlrm_default_b2048"])
def test_lookups_of_measured_workloads(shared: Path, name: str) -> None:
    path = shared / "h200" / "workloads.py"
    if not path.is_file():
        pytest.skip(f"no workloads at {path}")
    workloads = runpy.run_path(str(path))
    given = workloads["CASES"][name][1]
    tables, count, alpha = given["tables"], given["batch"] * given["pool"], given.get("alpha", 0.0)
    drawn = [of(workloads["zipf_indices"](n, count, alpha, "cpu", 7 + k)) for k, n in enumerate(tables)]
    graph = capture(workloads["build"], {"name": name})
    forward, backward = known(graph, "_embedding_bag"), known(graph, "_embedding_bag_dense_backward")
    assert forward == backward[::-1] and len(forward) == len(tables)
    for (distinct, most), real in zip(forward, drawn, strict=True):
        assert distinct == pytest.approx(real[0], rel=0.02) and abs(most - real[1]) <= max(2, 0.02 * real[1])
