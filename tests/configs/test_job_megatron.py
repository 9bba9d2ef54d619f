"""Megatron's arguments: scripts are read without being run, and what is not understood is told."""

from __future__ import annotations

import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.configs.job import Job, Recompute
from presage.configs.job_file import read_job_file
from presage.configs.megatron import arguments_sections, read_arguments
from presage.configs.script_arguments import expert_layers, pipeline_layout, shell
from presage.errors import PresageError

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50000"
LEAST = f"{SIZES} --seq-length 2048 --micro-batch-size 1"


def job(tmp_path: Path, script: str, more: str = "", name: str = "train.sh") -> tuple[Job, tuple[str, ...]]:
    (tmp_path / name).write_text(script)
    path = tmp_path / "job.toml"
    path.write_text(f'arguments = "{name}"\n{more}\n[cluster]\nplatform = "dgx-h100"\n')
    return read_job_file(path)[:2]


def sections(arguments: str) -> dict[str, Any]:
    return arguments_sections(shell(arguments).arguments)[0]


def test_the_example_is_gpt3_on_1024_gpus() -> None:
    made, notes, *_ = read_job_file(ROOT / "examples" / "jobs" / "megatron.toml")
    assert made.model.parameters == pytest.approx(174.6e9, rel=1e-3)
    assert (made.gpus, made.dp, made.microbatches) == (1024, 16, 96)
    p = made.parallel
    assert (p.tp, p.pp, p.virtual, p.sequence_parallel, p.zero, p.schedule) == (8, 8, 6, True, 1, "interleaved")
    assert made.recompute == Recompute("selective") and made.precision == "bf16"
    assert notes == () and not made.framework.fused_accumulation


SLURM = """#!/bin/bash
#SBATCH --nodes=48
#SBATCH --gres=gpu:8                 # number of gpus
# srun --jobid 1 bash -c 'python -c "import socket; print(socket.gethostname())"'  --hidden-size 1
ADDRESS=$(scontrol show hostnames $LIST | head -n 1)
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
TP=4
MICRO=2  # was 1 till 784
LAYERS=70
LONG=$((2 * 1024))
GPT="    --pp-partition-method 'type:transformer|embedding' \\
    --num-layers $LAYERS --hidden-size 14336 --num-attention-heads 112 \\
    --seq-length ${LONG} --max-position-embeddings $LONG \\
    --micro-batch-size $MICRO --rampup-batch-size 192 16 9_765_625 --global-batch-size ${GLOBAL:-2048} \\
    --bf16 --position-embedding-type alibi --checkpoint-activations --pad-vocab-size-to 250880 \\
    "
cat <<EOT > config.json
{"train_micro_batch_size_per_gpu": $MICRO, "note": "don't"}
EOT
export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size 12 \\
    $GPT --deepspeed --deepspeed_config config.json --zero-stage 0 "
srun bash -c "torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank \\$RANK $CMD" 2>&1
"""


def test_a_slurm_script_of_megatron_deepspeed(tmp_path: Path) -> None:
    made, notes = job(tmp_path, SLURM)
    assert made.model.parameters == pytest.approx(176.2e9, rel=1e-3)
    assert (made.gpus, made.parallel.tp, made.parallel.pp, made.dp, made.microbatches) == (384, 4, 12, 8, 128)
    assert made.parallel.ends_as_layers and made.parallel.zero == 1  # its bf16 optimizer shards
    assert made.framework.key == "megatron-deepspeed" and made.framework.gradient_bytes == 4 and made.framework.dropout
    assert made.recompute == Recompute("full") and not made.overlap.gradients
    assert notes[0] == "not read: --rampup-batch-size"


def test_arrays_quotes_and_comments(tmp_path: Path) -> None:
    script = """
    ARGS=(
        --num-layers 4
        --hidden-size 512   # wide
        --num-attention-heads 8
        # --num-attention-heads 16
        --group-query-attention
        --num-query-groups 2
        "--seq-length 1024"
        --micro-batch-size=4
        --vocab-size 1000 \\
        #--load somewhere \\
        --swiglu --disable-bias-linear --normalization RMSNorm
    )
    ARGS+=("--fp8-format hybrid" "--bf16")
    torchrun --nproc_per_node 8 --nnodes 2 train.py "${ARGS[@]}"
    """
    made, notes = job(tmp_path, script)
    m = made.model
    assert (m.heads, m.kv_heads, m.activation, m.norm, m.bias) == (8, 2, "swiglu", "rmsnorm", False)
    assert (made.gpus, made.micro_batch, made.sequence, made.precision) == (16, 4, 1024, "fp8")
    assert m.tied and m.positions == "learned" and notes == ()


def test_of_two_values_the_last_is_taken_and_told(tmp_path: Path) -> None:
    script = f"""
    if [ $SIZE = big ]; then
        HIDDEN=8192
    else
        HIDDEN=4096
    fi
    train.py {LEAST} --hidden-size $HIDDEN --seq-length 4096
    """
    made, notes = job(tmp_path, script)
    assert (made.model.hidden, made.sequence) == (4096, 4096)
    assert "set more than once, the last taken: --hidden-size (HIDDEN)" in notes
    assert "--seq-length is given more than once: the last is taken" in notes


def test_a_variable_set_elsewhere_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        PresageError, match=r"--tensor-model-parallel-size: has no value: is its variable set elsewhere"
    ):
        job(tmp_path, LEAST + " --tensor-model-parallel-size $TP --bf16")
    with pytest.raises(PresageError, match=r"--global-batch-size: is 'big': it should be a number"):
        job(tmp_path, LEAST + " --global-batch-size big")


def test_nothing_in_a_script_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    job(
        tmp_path,
        f"X=$(touch {made})\nY=`touch {made}`\nZ=$((__import__('os').system('touch {made}')))\n{LEAST} $X $Y $Z",
    )
    assert not made.exists()


def test_json_and_yaml_and_lists(tmp_path: Path) -> None:
    table = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048, "vocab_size": 50000}
    nested = {"model": table, "trainer": {"num_nodes": 4, "devices": 8}, "bf16": True, "sequence_parallel": False}
    forms = {"a.json": json.dumps(nested), "b.json": json.dumps([*LEAST.split(), "--bf16"])}
    if importlib.util.find_spec("yaml"):
        forms["c.yaml"] = json.dumps(nested)  # JSON is YAML
    for name, text in forms.items():
        made, _ = job(tmp_path, text, name=name)
        assert (made.model.layers, made.sequence, made.precision) == (32, 2048, "bf16")
        assert made.gpus == (1 if name == "b.json" else 32)


def test_a_file_of_nemo(tmp_path: Path) -> None:
    nemo = {
        "trainer": {"num_nodes": 64, "devices": 8, "precision": "bf16"},
        "exp_manager": {"name": "grok"},
        "model": {
            "num_layers": 64, "hidden_size": 6144, "ffn_hidden_size": 32768, "num_attention_heads": 48,
            "num_query_groups": 8, "kv_channels": None, "encoder_seq_length": 8192, "activation": "fast-geglu",
            "normalization": "rmsnorm", "bias": False, "position_embedding_type": "rope", "num_moe_experts": 8,
            "moe_router_topk": 2, "moe_expert_capacity_factor": 1.0, "share_embeddings_and_output_weights": False,
            "tokenizer": {"type": "meta-llama/Meta-Llama-3-70B"}, "micro_batch_size": 1, "global_batch_size": 1024,
            "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8, "context_parallel_size": 2,
            "expert_model_parallel_size": 8, "virtual_pipeline_model_parallel_size": 8, "sequence_parallel": True,
            "fp8": False, "fp8_hybrid": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            "optim": {"name": "mcore_distributed_optim", "grad_sync_dtype": "bf16", "overlap_grad_sync": True},
        },
    }  # fmt: skip
    made, notes = job(tmp_path, json.dumps(nemo), name="grok.json")
    assert (made.gpus, made.dp, made.precision, made.sequence) == (512, 8, "bf16", 8192)
    m, p = made.model, made.parallel
    assert (m.vocab, m.kv_heads, m.activation, m.norm, m.bias, m.tied) == (128256, 8, "geglu", "rmsnorm", False, False)
    assert m.experts and (m.experts.ffn, m.experts.capacity) == (32768, 1.0)
    assert (p.virtual, p.zero, p.expert_tp) == (8, 1, 4) and made.framework.gradient_bytes == 2
    assert made.overlap.gradients and not made.overlap.parameters and not made.overlap.tensor
    assert not any(n.startswith("not read") for n in notes)


@pytest.mark.parametrize(
    ("arguments", "section", "found"),
    [
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", "parallel", {"virtual": 4}),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", "parallel", {"virtual": 2}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "parallel",
         {"fsdp": True, "zero": 3}),
        ("--use-distributed-optimizer", "parallel", {"zero": 1, "sequence_parallel": False}),
        ("--pipeline-model-parallel-size 3 --account-for-embedding-in-pipeline-split", "parallel",
         {"layers_as": [10, 11, 11]}),
        ("--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", "parallel", {"ends_as_layers": True}),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 "
         "--decoder-last-pipeline-num-layers 5", "parallel", {"layers_as": [7, 10, 10, 5]}),
        ("--tensor-model-parallel-size 4 --num-experts 8", "parallel", {"expert_tp": 4}),
        ("--tensor-model-parallel-size 4 --num-experts 8 --expert-tensor-parallel-size 1", "parallel",
         {"expert_tp": 1}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --bf16", "training", {"precision": "mxfp8"}),
        ("--fp16", "training", {"precision": "fp16"}),
        ("", "training", {"precision": "fp32", "recompute": "none"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8", "training",
         {"recompute": {"mode": "full", "share": 0.25}}),
        ("--recompute-granularity selective --recompute-modules mla_up_proj mlp", "training",
         {"recompute": "selective:mla_up_proj+mlp"}),
        ("--tp-comm-overlap --overlap-grad-reduce", "overlap",
         {"tensor": True, "gradients": True, "parameters": False}),
        ("--attention-dropout 0 --hidden-dropout 0.0", "framework", {"dropout": False}),
        ("--bf16", "framework", {"gradient_bytes": 4, "dropout": True}),
        ("--bf16 --grad-reduce-in-bf16", "framework", {"gradient_bytes": 2}),
        ("--checkpoint-activations --DDP-impl local --fp16", "framework",
         {"name": "megatron-2021", "gradient_bytes": 2}),
        ("--window-size 127,0 --window-attn-skip-freq 2", "model", {"window": 128, "window_every": 2}),
        ("--multi-latent-attention --q-lora-rank 1536", "model",
         {"latent": {"query_rank": 1536, "key_rank": 512, "nope": 128, "rope": 64, "value": 128}}),
        ("--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-layer-freq ([0]*1+[1]*26)", "model",
         {"experts": {"experts": 64, "top_k": 6, "ffn": 1408, "dense_layers": 1, "every": 1}}),
        ("--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-latent-size 512", "model",
         {"experts": {"experts": 64, "top_k": 6, "ffn": 1408, "latent": 512}}),
    ],
)  # fmt: skip
def test_arguments_in_our_words(arguments: str, section: str, found: dict[str, Any]) -> None:
    made = sections(f"{LEAST} {arguments}")[section]
    assert {k: made[k] for k in found} == found


def test_patterns_of_experts() -> None:
    assert expert_layers("2", 32, "f") == (0, 2)
    assert expert_layers("([0]*3+[1]*58)", 61, "f") == (3, 1)
    assert expert_layers("[0,1]*16", 32, "f") == (1, 2)
    assert expert_layers("([0]*4)", 4, "f") == (4, 1)
    for wrong in ("all", "([0]*3+[1]*x)", "([1]*99999999999)", "__import__('os')"):
        with pytest.raises(PresageError, match="--moe-layer-freq"):
            expert_layers(wrong, 61, "f")


def test_layouts_of_a_pipeline() -> None:
    deepseek = pipeline_layout("Et*3|(tt|)*29,m|L", "f")
    assert sum(deepseek) == 61 and len(deepseek) == 32 and deepseek[0] == 3 and deepseek[-1] == 0
    assert pipeline_layout("Ett|tt|(tt|)*2ttL", "f") == [2, 2, 2, 2, 2]
    assert pipeline_layout("Et|(tt|)*30mL", "f") == [1, *[2] * 30, 0]
    for wrong in ("Ett|xx", "((t|)*9999)*9999"):
        with pytest.raises(PresageError):
            pipeline_layout(wrong, "f")


@given(st.text(alphabet="--abnul-sizehd$ {}()\"'\\\n=#0123456789*+`:", max_size=120), st.booleans())
def test_no_text_is_answered_with_a_traceback(tmp_path_factory: pytest.TempPathFactory, text: str, more: bool) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "train.sh"
    path.write_text((LEAST + "\n" if more else "") + text)
    with suppress(PresageError):
        read_arguments(path)
