"""Collectives and messages that Megatron-core and DeepSpeed ask for, captured and by four real processes on gloo.

These libraries ask for CUDA by name: in the real processes the CPU stands for it. The tests need a Python that has the
libraries (last run: megatron-core 0.16.1, deepspeed 0.19.8, torch 2.13).
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from asked_collectives import in_real_processes, record, told
from presage.capture import capture
from presage.capture.rank_objects import sharing_objects
from presage.capture.variants import Variant

RANKS, LAYERS, WIDTH, ROWS, LENGTH, WORDS = 4, 4, 64, 2, 16, 128


def begin():
    if not dist.is_initialized():
        dist.init_process_group("nccl")


class OnCPU(TorchFunctionMode):
    """What is asked for on CUDA comes to lie on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


def stand_in_for_cuda():
    nothing, same = (lambda *_, **__: None), (lambda x, *_, **__: x)
    for name in ("synchronize", "empty_cache", "_lazy_call"):
        setattr(torch.cuda, name, nothing)
    for name in ("Stream", "stream", "current_stream", "Event"):
        setattr(torch.cuda, name, MagicMock())
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state, torch.cuda.manual_seed = torch.set_rng_state, torch.manual_seed
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = nn.Module.cuda = same
    if find_spec("deepspeed"):
        import_module("deepspeed.comm.torch").build_shm_op = nothing  # a library of its own for the CPU
    OnCPU().__enter__()


def megatron(microbatches=4, stages=1, chunks=1, tensor=1, experts=0, wrapped=False):
    """A GPT model; `wrapped` in Megatron's own data parallelism, with its distributed optimizer."""

    def build(_):
        from megatron.core import parallel_state as ps
        from megatron.core import pipeline_parallel, tensor_parallel
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        begin()
        ps.destroy_model_parallel()
        interleaved = chunks if chunks > 1 else None
        ps.initialize_model_parallel(tensor, stages, interleaved, expert_model_parallel_size=2 if experts else 1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, pipeline_dtype=torch.float32,
            add_bias_linear=False, gradient_accumulation_fusion=False, tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=interleaved,
            sequence_parallel=chunks > 1 or bool(experts),
            num_moe_experts=experts or None, expert_model_parallel_size=2 if experts else 1,
            moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=1.0 if experts else None,
            moe_pad_expert_input_to_capacity=bool(experts),
        )  # fmt: skip
        models = [
            GPTModel(
                config, block(LAYERS // stages // chunks, experts), vocab_size=WORDS, max_sequence_length=LENGTH,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=i),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=i),
                vp_stage=i if interleaved else None,
            ).cuda()
            for i in range(chunks)
        ]  # fmt: skip
        optimizer = distributed(config, models) if wrapped else torch.optim.SGD(nn.ModuleList(models).parameters(), 0.1)
        words = torch.randint(WORDS, (ROWS, LENGTH), device="cuda")
        places = torch.arange(LENGTH, device="cuda")[None].expand(ROWS, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH, device="cuda").tril().logical_not()
        run = pipeline_parallel.get_forward_backward_func()

        def forward(_, model):
            return model(words, places, mask, labels=words), lambda out: (out.mean(), {})

        def step():
            optimizer.zero_grad()
            for model in models if wrapped else []:
                model.zero_grad_buffer()
            run(
                forward_step_func=forward, data_iterator=[None] * chunks, model=models, num_microbatches=microbatches,
                seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
            )  # fmt: skip
            optimizer.step()

        return step

    return build


class Norm(nn.LayerNorm):
    """PyTorch's, which Megatron does not take for sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def block(layers, experts):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if experts:  # a name that Megatron 0.16 forgets where Transformer Engine is not installed
        import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None
    spec = get_gpt_layer_local_spec(experts or None)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([spec] * layers, Norm)


def distributed(config, models):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    how = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    models[:] = [DistributedDataParallel(config, how, model) for model in models]
    config.finalize_model_grads_func = finalize_model_grads
    return get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), models)


def deepspeed(stage, **zero):
    def build(_):
        import deepspeed as ds

        begin()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": stage, **zero},
        }
        engine, *_ = ds.initialize(model=model, config=config, dist_init_required=False)
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)

        def step():
            engine.backward(engine(x).float().sum())
            engine.step()

        return step

    return build


MEGATRON = {
    "tp2 pp2": megatron(stages=2, tensor=2),
    "tp2 pp2, interleaved, sequence-parallel": megatron(stages=2, chunks=2, tensor=2),
    "tp2 dp2, distributed optimizer": megatron(microbatches=2, tensor=2, wrapped=True),
    "ep2 tp2, sequence-parallel": megatron(microbatches=1, tensor=2, experts=4),
}
KEPT = {
    "param_persistence_threshold": 0,
    "max_live_parameters": 5000,
    "max_reuse_distance": 0,
    "prefetch_bucket_size": 0,
}
DEEPSPEED = {
    "ZeRO-1": deepspeed(1),
    "ZeRO-2": deepspeed(2, reduce_bucket_size=5000),
    "ZeRO-3": deepspeed(3, reduce_bucket_size=5000, **{f"stage3_{k}": n for k, n in KEPT.items()}),
}
REAL = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
CASES = {
    **(MEGATRON if find_spec("megatron") else {}),
    **(DEEPSPEED if find_spec("deepspeed") else {}),
}


def work(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS))
    stand_in_for_cuda()
    record(rank, folder, RANKS, CASES)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if not CASES:
        pytest.skip("neither Megatron-core nor DeepSpeed is installed")
    return in_real_processes(__file__, tmp_path_factory.mktemp("gloo"), RANKS, **REAL)


@pytest.mark.parametrize("name", [*MEGATRON, *DEEPSPEED])
def test_captured_ranks_of_a_library_ask_for_what_real_ones_do(real, name):
    if name not in CASES:
        pytest.skip("Megatron-core or DeepSpeed is not installed")
    with sharing_objects():
        for rank, asked in enumerate(real):
            if "pp2" not in name and 0 < rank < RANKS - 1:
                continue
            found = told(capture(lambda _: CASES[name]("cuda"), variant=Variant(ranks=RANKS, rank=rank)))
            assert found and found == asked[name], f"rank {rank}"


if __name__ == "__main__":
    for module in ("megatron.core.models.gpt.gpt_model", "megatron.core.optimizer", "deepspeed"):
        if find_spec(module.partition(".")[0]):
            import_module(module)  # once for all ranks
    torch.multiprocessing.start_processes(work, (sys.argv[1],), RANKS, start_method="fork")
