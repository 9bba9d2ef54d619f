"""Training scripts captured as they are: in the usual styles, and what is said where there is no step."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import presage as ps  # noqa: E402
from commands import runner  # noqa: E402
from presage.cli import graph, predict  # noqa: E402
from presage.costs.calibrated_kernels import host_op_seconds  # noqa: E402
from presage.errors import PresageError  # noqa: E402
from presage.graph.graph import HOST_MEMORY, ON_HOST, PINNED_MEMORY, Graph  # noqa: E402
from presage.scripts import OptimizerCycle, TrainingScript, is_script  # noqa: E402

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts may write where they run."""
    monkeypatch.chdir(tmp_path)


def graph_of(script: str, *argv: str, **arguments: Any) -> Any:
    return ps.step_graph(str(SCRIPTS / script), {"argv": list(argv), **arguments})


def names(graph: Any, phase: str = "") -> Counter[str]:
    return Counter(op.name for op in graph.ops if op.kernels and phase in ("", op.phase))


def test_a_script_gives_the_ops_of_the_same_step_written_as_a_function() -> None:
    def build(device: str) -> Callable[[], None]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 64, device=device)).sum().backward()
            optimizer.step()

        return step

    (Path.cwd() / "pack").symlink_to(SCRIPTS / "pack")
    script, function = ps.step_graph("-m pack.train"), ps.step_graph(build)
    assert names(script) == names(function)
    assert [op.module for op in script.ops if op.kernels] == [op.module for op in function.ops if op.kernels]
    assert sum(s.nbytes for s in script.storages) == sum(s.nbytes for s in function.storages)


def test_loader_workers_meters_checkpoints_and_evaluation_leave_the_training_step() -> None:
    graph = graph_of("classify.py", "--batch-size", "16")
    assert graph.loading["workers"] == 4
    assert graph.loading["batches"] == 1
    assert {op.phase for op in graph.ops} >= {"forward", "backward", "optimizer"}
    assert names(graph)["aten::cudnn_convolution"] == 1, "an evaluation has more than one"
    assert any("not all alike" in note for note in graph.notes)
    assert not Path("checkpoint.pth").exists(), "nothing of a checkpoint is written"
    images = [t for t in graph.tensors if t.shape == (16, 3, 64, 64)]
    assert images


def test_settings_of_a_script_are_overridden_as_its_author_meant() -> None:
    small, large = graph_of("gpt.py", "--batch_size=2"), graph_of("gpt.py", "--batch_size=2", "--n_layer=4")
    assert names(large)["aten::_cudnn_attention_forward"] == 2 * 4, "layers times microbatches"
    assert names(small)["aten::_cudnn_attention_forward"] == 2 * 2
    assert names(small)["aten::_fused_adamw_"] == 1
    assert small.arguments == {"argv": "--batch_size=2"}


def test_a_compiled_model_is_captured_as_compiled() -> None:
    graph = graph_of("gpt.py", "--compile=True")
    assert names(graph, "optimizer")
    assert any("compile" in note for note in graph.notes)


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_a_hugging_face_trainer_is_captured(precision: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = ["--output_dir", "out", "--report_to", "none", "--gradient_accumulation_steps", "2", precision, "True"]
    graph = graph_of("trainer.py", *options, "--per_device_train_batch_size", "4")
    assert names(graph, "forward")["aten::_cudnn_attention_forward"] == 2 * 2, "layers times microbatches"
    assert names(graph, "optimizer")
    assert graph.loading["batches"] == 2


def test_a_lightning_trainer_is_captured() -> None:
    pytest.importorskip("lightning")
    graph = graph_of("lit.py")
    assert names(graph, "forward")["aten::addmm"] == 2
    assert names(graph, "optimizer")
    assert graph.loading["workers"] == 2
    assert any(t.dtype == "bfloat16" for t in graph.tensors)


def test_a_loop_with_accelerate_is_captured_with_its_accumulation() -> None:
    pytest.importorskip("accelerate")
    assert names(graph_of("accelerated.py"), "forward")["aten::addmm"] == 2 * 2


@pytest.mark.parametrize("critics", [1, 3])
def test_optimizers_that_take_turns_make_one_step(critics: int) -> None:
    graph = graph_of("gan.py", str(critics))
    per_optimizer = names(graph_of("gan.py"), "optimizer").total() // 2
    assert names(graph, "optimizer").total() == (critics + 1) * per_optimizer
    said = f"the step is one round of 2 optimizers, in which one of them steps {critics} times"
    assert (said in graph.notes) == (critics > 1)


WHOLE_GRAPH = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).cuda()
opt = torch.optim.AdamW(model.parameters(), capturable=True)
x = torch.randn(8, 64, device="cuda")

def train():
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        train()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    train()
for _ in range(100):
    x.copy_(torch.randn(8, 64))
    graph.replay()
"""


def test_a_step_that_a_cuda_graph_holds_is_its_replay_not_its_warm_up() -> None:
    Path("mine.py").write_text(WHOLE_GRAPH)
    graph = ps.step_graph("mine.py")
    replayed = [op for op in graph.ops if op.replayed]
    assert {op.phase for op in replayed if op.kernels} == {"forward", "backward", "optimizer"}
    assert sum(op.name == "aten::addmm" for op in replayed) == 4
    assert not any(op.phase == "optimizer" for op in graph.ops if not op.replayed)


def test_steps_that_all_run_on_another_stream_are_found() -> None:
    Path("mine.py").write_text(WHOLE_GRAPH.replace("range(3)", "range(40)"))
    graph = ps.step_graph("mine.py")
    assert not any(op.replayed for op in graph.ops)
    assert sum(op.name == "aten::addmm" for op in graph.ops) == 4


def test_a_scaler_and_accumulation_need_nothing_special() -> None:
    graph = graph_of("amp.py", "--accumulate", "3")
    assert names(graph, "forward")["aten::addmm"] == 2 * 3
    assert names(graph, "optimizer")["aten::_amp_foreach_non_finite_check_and_unscale_"] <= 1


def test_optimizers_that_step_in_the_backward_pass_make_one_step() -> None:
    graph = graph_of("amp.py", "--optimizers", "each")
    assert names(graph, "forward")["aten::addmm"] == 2
    assert len({op.line for op in graph.ops if op.phase == "optimizer"}) >= 1


def test_a_step_can_be_one_call_of_a_function() -> None:
    graph = graph_of("amp.py", "--no-train", step="train_step")
    assert names(graph)["aten::addmm"] == 2
    assert graph.notes[:2] == ("the step has no backward pass on the GPU", "the step has no optimizer on the GPU")


def test_a_script_with_two_steps_gives_its_second() -> None:
    graph = graph_of("amp.py", "--iterations", "2")
    assert names(graph, "optimizer")
    assert graph.arguments["step_at"] == "2"


def test_the_step_to_take_can_be_chosen() -> None:
    evaluating = graph_of("classify.py", "--images", "64", "--batch-size", "32", step_at=3)
    assert names(evaluating)["aten::cudnn_convolution"] > 1, "between the epochs lies an evaluation"


@pytest.mark.parametrize(
    ("script", "argv", "arguments", "said"),
    [
        ("classify.py", ["--device", "cpu"], {}, "ran on the CPU: nothing to predict"),
        ("classify.py", ["--batch"], {}, "classify.py ended before its step was captured: classify.py: error: "),
        ("classify.py", ["--batch"], {}, "; its own arguments go after --: "),
        ("amp.py", ["--no-train"], {}, "ended without optimizer.step()"),
        ("amp.py", ["--iterations", "1"], {}, "ended after 1 optimizer step: "),
        ("amp.py", ["--iterations", "2"], {"step": "no_such"}, "ended without a call of no_such"),
        ("amp.py", ["--iterations", "3"], {"step_at": 9}, "there is no step 9"),
        (
            "endless.py",
            [],
            {"limit": 1.0},
            "endless.py:10): give it more time (--limit SECONDS)",
        ),
        ("gpt.py", ["--nosuch=1"], {}, "gpt.py:33: ValueError: Unknown config key: nosuch"),
        ("pack/net.py", [], {}, "ended without optimizer.step()"),
    ],
)
def test_where_there_is_no_step_one_sentence_says_so(
    script: str, argv: list[str], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(PresageError) as error:
        graph_of(script, *argv, **arguments)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_builds_a_step_is_told_how_to_name_it() -> None:
    Path("mine.py").write_text("def build(device):\n    return lambda: None\n")
    with pytest.raises(PresageError, match=r"did you mean the step that build builds, mine\.py:build\?"):
        ps.step_graph("mine.py")


def test_a_function_whose_step_stays_on_the_cpu_is_told_so() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(PresageError, match="the step ran on the CPU: nothing to predict; build the model"):
        ps.step_graph(lambda device: lambda: model(torch.zeros(1, 4)).sum().backward())  # noqa: ARG005


def test_a_script_leaves_the_process_as_it_was() -> None:
    Path("rude.py").write_text(
        "import os, random, sys, helper, torch\n"
        "os.environ['RUDE'] = '1'; os.chdir('/'); random.seed(5); torch.set_default_dtype(torch.float64)\n"
        "net = torch.nn.Linear(4, 4).cuda(); opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "try:\n"
        "    for _ in range(50):\n"
        "        net(torch.ones(2, 4, device='cuda')).sum().backward(); opt.step()\n"
        "except:\n"
        "    for _ in range(50):\n"
        "        net(torch.ones(2, 4, device='cuda'))\n"
    )
    Path("helper.py").write_text("x = 1\n")
    before = dict(os.environ), os.getcwd(), list(sys.path), sys.argv, random.getstate(), torch.get_rng_state()
    graph = ps.step_graph("rude.py")
    now = dict(os.environ), os.getcwd(), list(sys.path), sys.argv, random.getstate(), torch.get_rng_state()
    assert before[:-1] == now[:-1]
    assert torch.equal(before[-1], now[-1])
    assert "helper" not in sys.modules
    assert torch.get_default_dtype() == torch.float32
    assert names(graph, "optimizer")


def test_the_same_script_gives_the_same_step_again() -> None:
    Path("drops.py").write_text(
        "import random, numpy, torch\n"
        "layers = [torch.nn.Linear(8, 8).cuda() for _ in range(6)]\n"
        "opt = torch.optim.SGD([p for l in layers for p in l.parameters()], 0.1)\n"
        "for _ in range(100):\n"
        "    x = torch.randn(4, 8, device='cuda', requires_grad=True)\n"
        "    for layer in layers:\n"
        "        if random.random() < 0.5 and numpy.random.rand() < 0.9 and torch.rand(()) < 0.9:\n"
        "            x = layer(x)\n"
        "    x.sum().backward(); opt.step(); opt.zero_grad()\n"
    )
    first, second = ps.step_graph("drops.py"), ps.step_graph("drops.py")
    assert first == second or names(first) == names(second)
    assert first.notes == second.notes


def test_what_if_runs_the_script_again() -> None:
    found = ps.what_if(str(SCRIPTS / "gpt.py"), "bf16,batch=4", arguments={"argv": "--batch_size=2"})
    assert found.work == 2.0
    assert "argv" in found.edited.arguments
    assert "--batch_size=4" in found.edited.arguments["argv"]


def test_the_command_line_takes_a_script_with_its_arguments() -> None:
    (Path.cwd() / "pack").symlink_to(SCRIPTS / "pack")
    data = json.loads(runner(predict.command)("-m", "pack.train", "--json", "-", "--", "width=128"))
    assert data["source"] == "-m pack.train"
    assert data["arguments"] == {"argv": "width=128"}
    shown = runner(graph.command)(str(SCRIPTS / "amp.py"), "--", "--accumulate", "1")
    assert shown.endswith(f"next: presage predict {SCRIPTS / 'amp.py'} -- --accumulate 1\n")


# ---- where steps end


def boundaries(order: str, there: str = "") -> list[int]:
    cycle = OptimizerCycle()
    return [k for k, name in enumerate(order, 1) if cycle.stepped(ord(name), {ord(n) for n in there or order})]


def test_the_shortest_cycle_of_all_optimizers_is_a_step() -> None:
    assert boundaries("aaaa") == [2, 3, 4]
    assert boundaries("abababab") == [4, 6, 8]
    assert boundaries("dddddg" * 3) == [12, 18]
    assert boundaries("abc" * 3, "abc") == [6, 9]
    assert boundaries("aaaabaaaab", "ab") == [10], "one more than the first four"


def test_an_optimizer_that_never_steps_is_not_waited_for_for_ever() -> None:
    assert boundaries("a" * 20, "ab")[0] == 16


def test_an_optimizer_that_steps_rarely_is_left_out_and_named(tmp_path: Path) -> None:
    assert boundaries("ams" + "am" * 20)[0] == 3 + 6 * 2
    assert boundaries("g" + "dddddg" * 3)[0] == 12, "five critics are a round"
    script = tmp_path / "outer.py"
    script.write_text(
        "import torch\n"
        "layer = torch.nn.Linear(8, 8).cuda()\n"
        "inner, outer = torch.optim.AdamW(layer.parameters()), torch.optim.SGD(layer.parameters())\n"
        "for step in range(100):\n"
        "    layer(torch.ones(4, 8, device='cuda')).sum().backward()\n"
        "    inner.step()\n"
        "    if step % 28 == 0:\n"
        "        outer.step()\n"
    )
    graph = ps.step_graph(str(script))
    assert "SGD stepped less often than the other optimizers: no part of this step" in graph.notes
    assert names(graph, "forward")["aten::addmm"] == 1


def test_options_of_a_script_are_found_in_all_their_forms() -> None:
    for given, changed in (
        ("--batch-size 12", "--batch-size 24"),
        ("--batch_size=12", "--batch_size=24"),
        ("batch_size=12 lr=1", "batch_size=24 lr=1"),
    ):
        script, before = TrainingScript.of("train.py", {"argv": given}).with_option(("batch", "batch_size"), 24)
        assert script.arguments["argv"] == changed
        assert before == "12"
    with pytest.raises(PresageError, match="was given no batch"):
        TrainingScript("train.py").with_option(("batch", "batch_size"), 24)
    assert is_script("train.py")
    assert is_script("-m package.train")
    assert not is_script("train.py:build")


def test_checkpoints_are_saved_moved_and_loaded_without_a_file() -> None:
    Path("resumes.py").write_text(
        "import os, torch\n"
        "net = torch.nn.Linear(64, 64).cuda(); opt = torch.optim.AdamW(net.parameters())\n"
        "for i in range(50):\n"
        "    net(torch.randn(8, 64, device='cuda')).sum().backward(); opt.step(); opt.zero_grad()\n"
        "    torch.save({'net': net.state_dict(), 'opt': opt.state_dict(), 'i': i}, 'part.pt')\n"
        "    os.replace('part.pt', 'last.pt')\n"
        "    assert os.path.exists('last.pt') and not os.path.exists('part.pt')\n"
        "    state = torch.load('last.pt', map_location='cpu', weights_only=True)\n"
        "    assert state['i'] == i and not state['net']['weight'].is_cuda\n"
        "    net.load_state_dict(state['net']); opt.load_state_dict(state['opt'])\n"
    )
    Path("last.pt").write_text("the user's")
    assert names(ps.step_graph("resumes.py"), "optimizer")
    assert Path("last.pt").read_text() == "the user's"
    assert not Path("part.pt").exists()


COPIES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(64, 64).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1)
pinned, made = torch.randn(64, 64).pin_memory(), torch.empty(64, 64, pin_memory=True)
assert pinned.is_pinned() and made.is_pinned() and not torch.randn(2).is_pinned()
for (batch,) in DataLoader(TensorDataset(torch.randn(8192, 64)), 64, pin_memory=True, num_workers=2):
    x = batch.cuda(non_blocking=True) + made.cuda(non_blocking=True) + pinned[:1].cuda(non_blocking=True)  # pinned
    x = x + torch.ones(64, 64).cuda(non_blocking=True)  # taken over
    large = torch.zeros(1 << 20).cuda(non_blocking=True)  # waits
    small, drawn = made.cuda(), torch.randn(1 << 20)  # told to wait
    opt.zero_grad()
    (model(x).sum() + large.sum() + small.sum()).backward()
    opt.step()
    x.detach().to("cpu", non_blocking=True)  # made pinned
    x.detach().cpu()  # back
"""


def copies_of(graph: Graph) -> dict[str, list[tuple[str, bool]]]:
    """By the remark in the script's line: the host memory of each copy, and whether the host waits."""
    remarks = {k: line.rpartition("# ")[2] for k, line in enumerate(COPIES.splitlines(), 1)}
    out: dict[str, list[tuple[str, bool]]] = {}
    for op in graph.ops:
        found = {graph.storages[t.storage].name for t in graph.inputs_of(op)} & ON_HOST
        if op.name == "aten::copy_" and found:
            out.setdefault(remarks[int(op.line.rpartition(":")[2])], []).append((found.pop(), op.sync))
    return out


def test_copies_know_pinned_memory_and_when_the_host_waits(tmp_path: Path) -> None:
    (tmp_path / "copies.py").write_text(COPIES)
    graph = ps.step_graph(str(tmp_path / "copies.py"))
    assert copies_of(graph) == {
        "pinned": 3 * [(PINNED_MEMORY, False)],
        "taken over": [(HOST_MEMORY, False)],
        "waits": [(HOST_MEMORY, True)],
        "told to wait": [(PINNED_MEMORY, True)],
        "made pinned": [(PINNED_MEMORY, False)],
        "back": [(HOST_MEMORY, True)],
    }
    (filled,) = [op for op in graph.ops if op.name == "aten::randn" and op.outputs]
    assert host_op_seconds(graph, filled) == pytest.approx(6.8e-3, rel=0.01), "measured: 5.6 to 7.1 ms"
    found = graph.loading
    assert (found["workers"], found["pinned"], found["batch_bytes"]) == (2, 1.0, 4 * 64 * 64)
    assert found["batch_seconds"] < 0.02, "the time of its data, not of the fake tensors that stand for them"
