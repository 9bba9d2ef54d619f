"""Ops that other Python threads run are part of the step."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch
from torch import nn

from presage.capture import capture
from presage.errors import PresageError
from presage.graph import summary

PRODUCT = 2 * 32 * 64 * 64


def layers(n, device):
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(n)]).to(device)


def trained(models, loss):
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def in_pool(run):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def in_thread(run):
    out = []
    thread = threading.Thread(target=lambda: out.append(run()))
    thread.start()
    thread.join()
    return out[0]


@pytest.mark.parametrize("elsewhere", [in_thread, in_pool])
def test_ops_of_other_threads_are_counted(elsewhere):
    def build(device):
        a, b, x = layers(2, device), layers(3, device), torch.randn(32, 64, device=device)
        return trained([a, b], lambda: (a(x) + elsewhere(lambda: b(x))).sum())

    graph = capture(build)
    assert summary.total(graph).flops == PRODUCT * (5 + 8)
    assert any("other threads" in note for note in graph.notes)


def test_a_thread_that_makes_batches_ahead_makes_one_a_step():
    def build(device):
        batches, made, model = Queue(2), layers(3, device), layers(2, device)

        def make():
            while True:
                with torch.no_grad():
                    batches.put(made(torch.randn(32, 64, device=device)))

        threading.Thread(target=make, daemon=True).start()
        return trained([model], lambda: model(batches.get(timeout=20)).sum())

    assert summary.total(capture(build)).flops == PRODUCT * (5 + 3)


def test_what_fails_in_a_thread_fails_the_capture():
    def build(device):
        x = torch.randn(32, 64, device=device)

        def step():
            thread = threading.Thread(target=lambda: x @ torch.randn(32, 64, device=device))
            thread.start()
            thread.join()

        return step

    with pytest.raises(PresageError, match="test_threads"):
        capture(build)
