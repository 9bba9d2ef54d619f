#!/bin/bash
# GPT-3 175B with Megatron-LM on 128 nodes of 8 GPUs.
GPUS_PER_NODE=8
NNODES=${NNODES:-128}
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))

LAYERS=96
HIDDEN=12288
SEQUENCE=2048

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)

MODEL_ARGS="
    --num-layers $LAYERS \
    --hidden-size $HIDDEN \
    --num-attention-heads 96 \
    --seq-length $SEQUENCE \
    --max-position-embeddings $SEQUENCE \
    --attention-dropout 0.0 --hidden-dropout 0.0 \
    --tokenizer-type GPT2BPETokenizer \
"

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-iters 1000        # of no matter here
    --bf16
    --recompute-activations
    # --recompute-granularity full
    --use-flash-attn
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 8
    --num-layers-per-virtual-pipeline-stage 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --no-gradient-accumulation-fusion
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $MODEL_ARGS ${TRAINING_ARGS[@]} ${PARALLEL_ARGS[@]}
