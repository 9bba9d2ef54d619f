"""A reinforcement-learning step as values: [rl] of a job file, checked, with what is assumed in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from presage.configs.job import Job
from presage.configs.models import preset
from presage.configs.schema import EngineConfig, RlConfig, convert_section
from presage.configs.transformer import Transformer
from presage.errors import InputError, PresageError
from presage.files.reading import lines

Table = Mapping[str, Any]
# Which algorithms have a critic, and which usually hold the policy near a reference.
CRITIC, REFERENCE = ("ppo",), ("ppo", "grpo", "rloo", "reinforce++")
ALGORITHMS = ("grpo", "ppo", "dapo", "rloo", "reinforce++")
ALIASES = {"gae": "ppo", "reinforce_plus_plus": "reinforce++", "gspo": "grpo", "dr_grpo": "grpo"}
ENGINES = ("vllm", "sglang")
PACKINGS = ("packed", "unpadded", "padded")
PLACEMENTS = ("colocated", "disaggregated")
ENGINE_PRECISIONS = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
UTILIZATION = {"colocated": 0.6, "disaggregated": 0.9}  # NeMo-RL's default where engines share GPUs, vLLM's otherwise
SIGMA = 0.6  # of the logarithm of response lengths, where nothing is known
PROMPT = 256.0  # tokens, where nothing is known
MEAN_SHARE = 1 / 3  # of the longest response
MOST = 1_000_000  # responses of a step


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """The distribution of response lengths: log-normal and cut off at the longest, or lengths seen."""

    mean: float  # after the cut
    longest: int
    sigma: float = SIGMA
    seen: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """A decoding engine: replicas of `tp` GPUs each, with continuous batching."""

    gpus: int
    name: str = "vllm"
    tp: int = 1
    ep: int = 1  # experts spread over the ranks of a replica, instead of each cut by tp
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    precision: str = "bf16"
    kv_cache_precision: str = "bf16"
    cuda_graphs: bool = True
    async_scheduling: bool = True  # the next batch is scheduled while one runs
    prefix_caching: bool = True

    @property
    def replicas(self) -> int:
        return self.gpus // self.tp


@dataclass(frozen=True)
class PostTraining:
    """One step: responses to prompts, their rewards and log-probabilities, updates, new weights for the engine."""

    algorithm: str
    prompts: int
    samples: int
    prompt_length: float
    lengths: ResponseLengths
    engine: Engine
    mini_batch: int  # responses
    epochs: int = 1
    packing: str = "packed"
    microbatch_tokens: int = 0
    old_log_probs: bool = True
    reference: bool = True
    critic: Transformer | None = None
    reward_model: Transformer | None = None
    reward_seconds: float = 0.0
    placement: str = "colocated"
    staleness: int = 0
    in_flight: bool = False  # a batch begins while the last responses of the one before go on
    offload: bool = True  # the trainer's weights and states wait in host memory while the engine decodes on its GPUs
    reference_offload: bool = True  # the reference's weights, while they are not used

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def batches_ahead(self) -> int:
        """Batches that the engine decodes at once: the tail of one hides under those after it."""
        return max(1, self.staleness + self.in_flight)

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"


def training_defaults(sections: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The sections with the sequence length that [rl] implies, where there is [rl]."""
    rl, training = sections.get("rl"), dict(sections.get("training", {}))
    if not isinstance(rl, Mapping):
        return sections
    for key in ("global_batch", "microbatches"):
        if training.get(key) is not None:
            what = "is of training alone: with [rl] the responses of an update are rl.mini_batch"
            raise InputError(path, what, f"training.{key}")
    longest, seen, prompt = (rl.get(key) for key in ("response_max", "response_lengths", "prompt_length"))
    if longest is None and isinstance(seen, str | list):
        longest = int(max(_seen(seen, path)))
    if training.get("sequence") is None and isinstance(longest, int):
        room = prompt if isinstance(prompt, int | float) else PROMPT
        training["sequence"] = 128 * -(-int(longest + room) // 128)
    return {**sections, "training": training}


def read_post_training(table: Table | None, job: Job, path: str | Path) -> tuple[PostTraining | None, tuple[str, ...]]:
    """[rl] of a job file and what is assumed of it; None without."""
    if table is None:
        return None, ()
    w = convert_section(path, table, RlConfig, "rl")
    algorithm = ALIASES.get(w.algorithm.lower(), w.algorithm.lower())
    _choose(path, "rl.algorithm", algorithm, ALGORITHMS)
    _choose(path, "rl.packing", w.packing, PACKINGS)
    placement = w.placement or ("disaggregated" if w.engine.gpus else "colocated")
    _choose(path, "rl.placement", placement, PLACEMENTS)
    _check_counts(w, placement, path)
    assert w.prompts is not None
    prompt = PROMPT if w.prompt_length is None else w.prompt_length
    lengths, notes = _lengths(w, job.sequence - prompt, path)
    if w.prompt_length is None:
        notes = (f"prompts are taken to have {PROMPT:g} tokens: rl.prompt_length for yours", *notes)
    engine = _engine(w.engine, job, placement, path)
    responses = w.prompts * w.samples
    mini = w.mini_batch or responses
    if mini > responses or responses % mini:
        raise InputError(
            path, f"prompts x samples = mini_batch x n: {responses} is no multiple of {mini}", "rl.mini_batch"
        )
    rl = PostTraining(
        algorithm=algorithm, prompts=w.prompts, samples=w.samples, prompt_length=prompt, lengths=lengths,
        engine=engine, mini_batch=mini, epochs=w.epochs, packing=w.packing,
        microbatch_tokens=w.microbatch_tokens or job.sequence * job.micro_batch, old_log_probs=w.old_log_probs,
        reference=algorithm in REFERENCE if w.reference is None else w.reference,
        critic=_model(w.critic, path, "critic") or (job.model if algorithm in CRITIC else None),
        reward_model=_model(w.reward_model, path, "reward_model"), reward_seconds=w.reward_seconds,
        placement=placement, staleness=w.staleness, in_flight=w.in_flight, offload=w.offload,
        reference_offload=w.offload if w.reference_offload is None else w.reference_offload,
    )  # fmt: skip
    if w.engine.async_scheduling is None:
        notes = (
            *notes,
            f"{engine.name} is taken to schedule while it decodes: rl.engine.async_scheduling = false for old ones",
        )
    if not w.reward_seconds and rl.reward_model is None:
        notes = (*notes, "rewards by rule are taken to cost no time: rl.reward_seconds for others")
    return rl, notes


def _choose(path: str | Path, key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(path, f"is {value!r}: choose from {', '.join(known)}", key)


def _check_counts(w: RlConfig, placement: str, path: str | Path) -> None:
    if w.prompts is None:
        raise InputError(path, "is missing: the prompts of a step", "rl.prompts")
    for key in ("prompts", "samples", "epochs"):
        if getattr(w, key) < 1:
            raise InputError(path, f"is {getattr(w, key)}: it should be 1 or more", f"rl.{key}")
    if w.prompts * w.samples > MOST:
        raise InputError(path, f"prompts x samples <= {MOST:,}: it is {w.prompts * w.samples:,}", "rl.prompts")
    for key in ("prompt_length", "reward_seconds", "staleness"):
        if (getattr(w, key) or 0) < 0:
            raise InputError(path, f"is {getattr(w, key)}: it should not be negative", f"rl.{key}")
    if w.mini_batch is not None and w.mini_batch < 1:
        raise InputError(path, f"is {w.mini_batch}: it should be 1 or more", "rl.mini_batch")
    if w.staleness and placement == "colocated":
        what = 'needs GPUs for each side: give rl.engine.gpus and rl.placement = "disaggregated", or staleness = 0'
        raise InputError(path, what, "rl.staleness")
    if w.in_flight and not w.staleness:
        raise InputError(
            path, "needs staleness = 1 or more: a batch then has responses of older weights", "rl.in_flight"
        )


def _lengths(w: RlConfig, room: float, path: str | Path) -> tuple[ResponseLengths, tuple[str, ...]]:
    """The distribution of lengths, none longer than a sequence has room for, and what of it is assumed."""
    if room < 1:
        raise InputError(path, "leaves no room for a response in training.sequence", "rl.prompt_length")
    if w.response_lengths is not None:
        seen = _seen(w.response_lengths, path)
        longest = min(w.response_max or int(max(seen)), int(room))
        cut = tuple(min(x, float(longest)) for x in seen)
        return ResponseLengths(sum(cut) / len(cut), longest, seen=cut), ()
    if w.response_max is None:
        raise InputError(path, "is missing: tokens of the longest response, or response_lengths", "rl.response_max")
    longest = min(w.response_max, int(room))
    mean, sigma = w.response_mean or longest * MEAN_SHARE, SIGMA if w.response_sigma is None else w.response_sigma
    if not 1 <= mean <= longest:
        raise InputError(path, f"lies between 1 and the longest, {longest}: it is {mean:g}", "rl.response_mean")
    if not 0 <= sigma <= 3:
        raise InputError(path, f"lies between 0 and 3: it is {sigma:g}", "rl.response_sigma")
    notes = []
    if w.response_mean is None:
        notes.append(
            f"responses are taken to have {mean:,.0f} tokens, a third of the longest: rl.response_mean for yours"
        )
    if w.response_sigma is None:
        notes.append(f"response lengths are taken as log-normal with sigma {SIGMA}: rl.response_lengths for yours")
    return ResponseLengths(mean, longest, sigma), tuple(notes)


def _seen(given: str | list[float], path: str | Path) -> tuple[float, ...]:
    """Lengths from a list, or from a file: one a line, or "length,count" a line."""
    where: str | Path = path
    if isinstance(given, str):
        where = Path(path).parent / given
        try:
            given = [x for row in lines(where) for x in _row(row)]
        except ValueError as e:
            raise InputError(where, f"should have a length a line, or length,count: {e}") from e
    if not given or min(given) < 1 or not max(given) < 1e8:
        raise InputError(where, "should be response lengths in tokens, each 1 or more", "rl.response_lengths")
    return tuple(map(float, given))


def _row(row: str) -> list[float]:
    words = [w for w in re.split(r"[\s,]+", row.strip()) if w]
    if not words or words[0].startswith("#") or words[0].isalpha():
        return []
    count = int(float(words[1])) if len(words) > 1 else 1
    if not 0 <= count <= MOST:
        raise ValueError(f"count {count}")
    return [float(words[0])] * count


def _engine(w: EngineConfig, job: Job, placement: str, path: str | Path) -> Engine:
    _choose(path, "rl.engine.name", w.name, ENGINES)
    kv = w.kv_cache_precision or "bf16"
    _choose(path, "rl.engine.precision", w.precision, tuple(ENGINE_PRECISIONS))
    _choose(path, "rl.engine.kv_cache_precision", kv, tuple(ENGINE_PRECISIONS))
    for key in ("tp", "ep", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(w, key) < 1:
            raise InputError(path, f"is {getattr(w, key)}: it should be 1 or more", f"rl.engine.{key}")
    gpus = _engine_gpus(w, job, placement, path)
    used = UTILIZATION[placement] if w.gpu_memory_utilization is None else w.gpu_memory_utilization
    if not 0 < used <= 1:
        raise InputError(path, f"lies between 0 and 1: it is {used:g}", "rl.engine.gpu_memory_utilization")
    return Engine(
        gpus=gpus, name=w.name, tp=w.tp, ep=w.ep, max_num_seqs=w.max_num_seqs,
        max_num_batched_tokens=w.max_num_batched_tokens, gpu_memory_utilization=used, precision=w.precision,
        kv_cache_precision=kv, cuda_graphs=not w.enforce_eager,
        async_scheduling=w.async_scheduling is not False, prefix_caching=w.prefix_caching,
    )  # fmt: skip


def _engine_gpus(w: EngineConfig, job: Job, placement: str, path: str | Path) -> int:
    """GPUs that the engine decodes on."""
    if placement == "colocated":
        if w.gpus is not None and w.gpus != job.gpus:
            own = 'rl.placement = "disaggregated" for its own'
            what = f"is {w.gpus}: a colocated engine has the trainer's {job.gpus}; {own}"
            raise InputError(path, what, "rl.engine.gpus")
        gpus = job.gpus
    elif w.gpus is None:
        raise InputError(path, "is missing: the GPUs of an engine apart from the trainer", "rl.engine.gpus")
    else:
        gpus = w.gpus
    if gpus < 1 or gpus % w.tp:
        raise InputError(path, f"engine gpus = tp x replicas: {gpus} is no multiple of {w.tp}", "rl.engine.tp")
    heads = job.model.heads
    if heads % w.tp:
        raise InputError(path, f"heads = tp x n: {heads} is no multiple of {w.tp}", "rl.engine.tp")
    if w.ep not in (1, w.tp):
        what = f"is {w.ep}: experts of a replica are cut by tp (ep = 1) or spread over its ranks (ep = tp = {w.tp})"
        raise InputError(path, what, "rl.engine.ep")
    return gpus


def _model(name: str | None, path: str | Path, key: str) -> Transformer | None:
    if not name:
        return None
    try:
        return preset(name)
    except PresageError as e:
        raise InputError(path, str(e), f"rl.{key}") from e
