"""The job file that describes code: a small GPT and a small Llama, on one GPU and spread over ranks by their code."""

import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from presage.capture import capture
from presage.capture.variants import Variant
from presage.cli.graph import StepName
from presage.cli.job_from import job_text
from presage.errors import PresageError
from presage.hardware import platform
from presage.prediction.api import predict, predict_ranks
from presage.prediction.from_code.agreement import compare_with_code
from presage.prediction.from_code.code_work import code_work, job_work, with_code_work
from presage.prediction.from_code.describe import describe

ROOT = Path(__file__).resolve().parents[2]
VOCAB, SEQUENCE, BATCH, LAYERS = 512, 64, 2, 3


class GptBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, ffn):
        super().__init__()
        self.size = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x, cos, sin):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Gpt(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(2 * SEQUENCE, dim)
        self.blocks = nn.ModuleList(GptBlock(dim, heads) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Llama(nn.Module):
    again = False

    def __init__(self, dim=64, heads=8, kv_heads=2, ffn=192):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, ffn) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        angles = torch.rand(SEQUENCE, dim // heads)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            args = block, x, self.cos, self.sin
            x = checkpoint(*args, use_reentrant=False) if self.again else block(*args[1:])
        return self.head(self.norm(x))


GPT = {
    "hidden": 64, "layers": LAYERS, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 256, "vocab": VOCAB,
    "activation": "gelu", "norm": "layernorm", "bias": True, "tied": True, "positions": "learned",
    "max_positions": 2 * SEQUENCE,
}  # fmt: skip
LLAMA = {
    "hidden": 64, "layers": LAYERS, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 192, "vocab": VOCAB,
    "activation": "swiglu", "norm": "rmsnorm", "bias": False, "tied": False, "positions": "rope",
}  # fmt: skip


def training(model, batches=1, autocast=True, optimizer=torch.optim.AdamW):
    opt = optimizer(model.parameters(), lr=1e-3)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), device="cuda")

    def step():
        opt.zero_grad()
        for _ in range(batches):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        opt.step()

    return step


def described(build, ranks=1):
    """The description of a step, and its graphs."""
    graphs = [capture(build, {}, source="train.py", variant=Variant(ranks=ranks))]
    return describe(graphs, ranks, platform("dgx-h100"), "train"), graphs


def sharded(model, **options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    return training(fully_shard(model, mp_policy=policy, **options), autocast=False)


def test_a_gpt_on_one_gpu_is_described_as_it_is():
    job, _ = described(lambda _: training(Gpt().cuda()))
    assert job.table["model"] == GPT
    wanted = {"sequence": SEQUENCE, "micro_batch": BATCH, "global_batch": BATCH, "precision": "bf16"}
    assert job.table["training"] == wanted | {"optimizer": "adam", "recompute": "none"}
    assert job.table["parallel"] == {"gpus": 1}
    assert job.table["framework"]["host"] == "torch-gpt"
    assert not job.assumed and not job.unsaid


@pytest.mark.slow
def test_a_llama_with_ddp_is_described_with_its_replicas_and_buckets():
    def build(_):
        dist.init_process_group("nccl")
        return training(nn.parallel.DistributedDataParallel(Llama().cuda()), batches=2)

    job, _ = described(build, 8)
    assert job.table["model"] == LLAMA
    assert job.table["parallel"] == {"gpus": 8}
    assert job.table["training"]["global_batch"] == BATCH * 8 * 2
    assert job.table["framework"]["bucket_MB"] > 0 and "overlap" not in job.table
    assert job.parse("train").job.dp == 8


def test_fsdp_and_recomputation_are_described():
    def build(_):
        dist.init_process_group("nccl")
        model = Llama().cuda()
        model.again = True
        return sharded(model)

    job, _ = described(build, 8)
    assert job.table["model"] == LLAMA
    assert job.table["parallel"] == {"gpus": 8, "zero": 3, "fsdp": True}
    assert job.table["training"]["recompute"] == "full"
    assert not job.unsaid


@pytest.mark.slow
def test_hybrid_sharding_says_how_many_share_a_copy():
    def build(_):
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        return sharded(Gpt().cuda(), mesh=mesh, reshard_after_forward=False)

    job, _ = described(build, 8)
    assert job.table["parallel"] == {"gpus": 8, "zero": 2, "fsdp": True, "shard": 4}


@pytest.mark.slow
def test_tensor_parallelism_multiplies_heads_and_widths():
    def build(_):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (2,))
        model = Llama().cuda()
        for block in model.blocks:
            split = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
            parallelize_module(block, mesh, {**split, "out": RowwiseParallel(), "down": RowwiseParallel()})
        return training(model, optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False))

    job, _ = described(build, 2)
    assert job.table["model"] == LLAMA
    assert job.table["parallel"] == {"gpus": 2, "tp": 2, "sequence_parallel": False}
    assert "head is not split" in job.unsaid[0]


@pytest.mark.slow
def test_stages_of_a_pipeline_are_put_together():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def build(_):
        dist.init_process_group("nccl")
        rank, model = dist.get_rank(), Llama()
        kept = nn.ModuleDict({str(k): model.blocks[k] for k in ((0,), (1, 2))[rank]})
        model.blocks = kept

        def forward(x):
            x = model.embed(x) if rank == 0 else x
            for block in kept.values():
                x = block(x, model.cos, model.sin)
            return model.head(model.norm(x)) if rank else x

        model.forward = forward
        model.cuda().bfloat16()
        stage = PipelineStage(model, rank, 2, torch.device("cuda"))
        loss = lambda y, t: F.cross_entropy(y.flatten(0, 1).float(), t.flatten())  # noqa: E731
        schedule, opt = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss), torch.optim.SGD(kept.parameters(), 0.1)
        ids = torch.randint(VOCAB, (4 * BATCH, SEQUENCE), device="cuda")

        def step():
            schedule.step(*([] if rank else [ids]), **({"target": ids} if rank else {}))
            opt.step()

        return step

    from presage.prediction.api import rank_graphs

    graphs = rank_graphs(lambda r: capture(build, {}, source="train.py", variant=Variant(ranks=2, rank=r)), 2)
    job = describe(graphs, 2, platform("dgx-h100"), "train")
    assert job.table["model"] == LLAMA
    assert job.table["parallel"] == {"gpus": 2, "pp": 2, "schedule": "gpipe", "layers_as": [1, 2]}
    assert job.table["training"]["micro_batch"] == BATCH and job.table["training"]["global_batch"] == 4 * BATCH
    assert job.table["training"]["optimizer"] == "sgd"


def test_experts_are_read_from_grouped_products():
    class Experts(nn.Module):
        def __init__(self, dim=64, count=4, ffn=128):
            super().__init__()
            self.router = nn.Linear(dim, count, bias=False)
            self.into, self.out = (nn.Parameter(torch.zeros(count, *s)) for s in ((dim, 2 * ffn), (ffn, dim)))

        def forward(self, x):
            rows = x.flatten(0, 1)
            chosen = self.router(rows).topk(2).indices.flatten()
            order = chosen.argsort() // 2
            ends = torch.arange(1, 5, device=x.device, dtype=torch.int32) * (len(chosen) // 4)
            gate, up = torch._grouped_mm(rows[order], self.into, offs=ends).chunk(2, -1)
            out = torch._grouped_mm(F.silu(gate) * up, self.out, offs=ends)
            return torch.zeros_like(rows).index_add_(0, order, out).view_as(x)

    class Block(LlamaBlock):
        def __init__(self):
            super().__init__(64, 8, 2, 192)
            del self.gate, self.up, self.down
            self.experts = Experts()

        def forward(self, x, cos, sin):
            h = self.norm1(x)
            q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q * cos, k * sin, v, is_causal=True, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.experts(self.norm2(x))

    def build(_):
        model = Llama()
        model.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        return training(model.cuda().bfloat16(), autocast=False)

    job, _ = described(build)
    assert job.table["model"]["experts"] == {"experts": 4, "top_k": 2, "ffn": 128}
    assert job.table["model"]["positions"] == "rope" and job.table["training"]["optimizer"] == "adam-16bit"
    assert not job.unsaid


def test_optimizer_precision_and_scores_in_memory_are_read_from_the_ops():
    class Plain(GptBlock):
        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(F.relu(self.up(self.norm2(x))).square())

    def build(_):
        model = Gpt()
        model.blocks = nn.ModuleList(Plain(64, 4) for _ in range(LAYERS))
        return training(model.cuda(), autocast=False, optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9))

    job, _ = described(build)
    assert job.table["model"] == GPT | {"activation": "relu2"}
    assert job.table["training"]["precision"] == "fp32"
    assert job.table["training"]["optimizer"] == "momentum" and job.table["training"]["recompute"] == "none"
    assert job.table["framework"]["attention"] == "unfused"
    assert job.assumed == ("causal = true: attention has a mask, which is not read",)


def test_parts_add_up_to_both_steps_and_both_have_the_same_flops_and_traffic():
    job, graphs = described(lambda _: training(Gpt(256, 4).cuda()))
    code = predict(graphs[0], gpu="h100", draws=1)
    job = with_code_work(job, code, job.parse("train").job)
    both = compare_with_code(code, job, job.parse("train"))
    assert sum(p.code for p in both.parts) == pytest.approx(both.code.step.p50, rel=0.01)
    assert sum(p.job for p in both.parts) == pytest.approx(both.job.step.p50, rel=0.01)
    mine, other = code_work(graphs[0]), job_work(both.job.job)
    assert other["products"].flops == pytest.approx(mine["products"].flops, rel=0.001)
    assert other["attention"].flops == pytest.approx(mine["attention"].flops, rel=0.05)
    assert other["streams"].moved == pytest.approx(mine["streams"].moved, rel=0.01)
    assert other["optimizer"].moved == pytest.approx(mine["optimizer"].moved, rel=0.01)


def test_several_ranks_are_compared_with_what_the_code_exposes():
    def build(_):
        dist.init_process_group("nccl")
        return sharded(Gpt().cuda())

    job, graphs = described(build, 8)
    code = predict_ranks(graphs, 8, platform="dgx-h100", draws=1)
    both = compare_with_code(code, job, job.parse("train"))
    parts = both.to_json()["parts"]
    assert parts["communication"]["code_ms"] >= 1e3 * code.many.exposed > 0
    assert sum(p["code_ms"] for p in parts.values()) == pytest.approx(1e3 * code.step.p50, rel=0.01)


def test_the_written_file_reads_back_as_the_same_job_and_says_what_is_assumed():
    job, _ = described(lambda _: training(Llama().cuda()))
    assumed = type(job)(job.table, ("norm = rmsnorm: not shown",), ())
    text = job_text(StepName("train.py", {"argv": ["--batch", "4"]}), assumed)
    assert tomllib.loads(text) == job.table
    assert text.startswith("# Read from `train.py -- --batch 4`") and "# Assumed: norm = rmsnorm: not shown." in text


@pytest.mark.parametrize("kind", ["no attention", "layers that differ", "no vocabulary"])
def test_code_that_is_no_such_transformer_is_refused_in_a_sentence(kind):
    def build(_):
        if kind == "no attention":
            model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB))
        elif kind == "layers that differ":
            model = Gpt()
            model.blocks[1] = GptBlock(64, 8)
        else:
            model = Gpt()
            model.head = nn.Identity()
        return training(model.cuda())

    words = {
        "no attention": "no attention was found",
        "layers that differ": "heads 4 and 8",
        "no vocabulary": "vocabulary",
    }
    with pytest.raises(PresageError, match=words[kind]):
        described(build)


def test_the_command_writes_the_file_and_answers_with_both_steps(tmp_path, capsys):
    from presage.cli.app import app
    from presage.cli.faults import run_guarded

    out, words = tmp_path / "job.toml", ["job", "--from", f"{ROOT / 'examples/gpt.py'}:build", "--arg", "layers=1"]
    code = run_guarded(lambda: app([*words, "--out", str(out), "-q"], standalone_mode=False), debug=True)
    assert code == 0 and "from the code" in capsys.readouterr().out
    assert tomllib.loads(out.read_text())["model"]["hidden"] == 1024
    code = run_guarded(lambda: app([*words, "--tokens", "1T"], standalone_mode=False), debug=False)
    assert code == 2 and "--tokens goes with a job file" in capsys.readouterr().err
