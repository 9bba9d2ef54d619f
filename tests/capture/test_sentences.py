"""What cannot be captured is told in one sentence, with the user's line and a remedy."""

import sys

import pytest
import torch
from torch import nn

from presage.capture import capture
from presage.errors import PresageError
from presage.usercode import SENTENCES, check_arguments, error_text, load

RAW = ("PrivateUse1", "Dynamo", "fburl", "HigherOrderOperator", "NVIDIA driver")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("aten::_coalesce: Could not run 'aten::empty' with arguments from the 'SparseCUDA' backend", "index_add"),
        (
            "aten::mul: Expected all tensors to be on the same device, but found two",
            "aten::mul is given tensors of the",
        ),
        ("aten::_thing: Found no NVIDIA driver on your system.", "register_op('aten::_thing'"),
        ("You should register `PrivateUse1HooksInterface`", "pin_memory"),
        ("There was no rule registered for HigherOrderOperator flex_attention and mode <x>", "flex_attention"),
        ("DDP expects same model across all ranks, but Rank 0 has 8 params", "--strategy ddp"),
        ("aten._foreach_mul_.Scalar got mixed torch.Tensor and DTensor, need to convert", "foreach=False"),
        ("No module named 'flash_attn'", "scaled_dot_product_attention"),
        ("No module named 'apex.optimizers'", "AdamW(fused=True)"),
        ("No module named 'torchao'", "torchao is not installed"),
        ("lib::op: There was no fake impl registered for <CustomOpDef(lib::op)>. This is", "register_op('lib::op'"),
        ("HTTPConnectionPool: Max retries exceeded with url", "download it before"),
    ],
)
def test_errors_of_other_libraries_become_sentences_with_a_remedy(text, said):
    told = error_text(RuntimeError(text))
    assert said in told and not any(word in told for word in RAW) and len(told) < 300


def test_a_file_that_is_not_there_is_told_with_where_paths_start(tmp_path):
    with pytest.raises(PresageError, match=r"test_sentences\.py:\d+: there is no '.*config\.json': paths of the code"):
        capture(lambda _: (tmp_path / "config.json").open())


def test_a_line_that_this_python_cannot_read_says_which_python_it_is():
    told = error_text(SyntaxError("f-string: unmatched '(' (train.py, line 9)"))
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot read" in told and "unmatched '('" in told


def test_an_error_without_a_sentence_is_cut_short():
    assert len(error_text(RuntimeError("word " * 1000))) < 330
    assert all(sentence for _, sentence in SENTENCES)


def grouped(device):
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(device), device_ids=[0])
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 64, device=device)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def test_a_process_group_of_one_rank_works_and_is_left(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    graph = capture(grouped)
    assert sum(op.name in ("aten::mm", "aten::addmm") for op in graph.ops if op.kernels) == 2
    assert not torch.distributed.is_initialized()


def test_cells_of_recurrent_networks_and_saved_tensors_on_the_host_are_captured():
    def build(device):
        lstm, gru, x = nn.LSTMCell(64, 64).to(device), nn.GRUCell(64, 64).to(device), torch.randn(32, 64, device=device)

        def step():
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                hidden, cell = lstm(x)
                loss = gru(x, hidden).sum() + cell.sum()
            loss.backward()

        return step

    graph = capture(build)
    assert {"aten::_thnn_fused_gru_cell", "aten::_thnn_fused_lstm_cell"} <= {op.name for op in graph.ops}


ARGPARSE = """
import argparse
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, {0})
    return parser.parse_args()
{1}
def build(device):
    assert parse().batch == 4
    return lambda: None
def main():
    parse()
"""


@pytest.mark.parametrize("at_import", ["", "args = parse()"])
def test_a_file_that_needs_a_command_line_is_sent_to_run_as_a_script(tmp_path, capfd, at_import):
    path = tmp_path / "train.py"
    path.write_text(ARGPARSE.format("required=True", at_import))
    with pytest.raises(
        PresageError, match=r"train\.py:6: .* required: --batch.* `presage predict .*train\.py -- ARGS`"
    ):
        load(f"{path}:build")("cuda")
    assert capfd.readouterr().err == ""
    path.write_text(ARGPARSE.format("default=4", at_import))
    assert callable(load(f"{path}:build")("cuda"))  # presage's own arguments are not in its way
    with pytest.raises(PresageError, match=r"should take the device first.* `presage predict .*train\.py -- ARGS`"):
        check_arguments(load(f"{path}:main"), ())
