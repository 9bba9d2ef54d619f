"""The job file of a captured transformer: its sections, what they assume, and what of the code they do not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from presage.configs.frameworks import framework
from presage.configs.job_file import JobTable, ParsedJob
from presage.configs.schema import merge_sections
from presage.graph.graph import Graph
from presage.hardware import Platform
from presage.prediction.from_code.code_ranks import CodeRanks, add_stages, code_ranks
from presage.prediction.from_code.code_traits import code_traits
from presage.prediction.from_code.products import StepProducts
from presage.prediction.from_code.step_layers import (
    EmbeddingTable,
    Layer,
    activation,
    counted,
    embedding_tables,
    not_described,
    rotates,
    step_layers,
)

FRAMEWORK = "pytorch"
OFF = 0.01  # of the parameters: a larger difference is said
PADDED = 128  # rows, fewer than which compiled code adds to a product with the vocabulary
MB = 1e6


@dataclass(frozen=True)
class CodeJob:
    """A job file's sections, read from code."""

    table: dict[str, Any]
    assumed: tuple[str, ...]  # what the code does not show
    unsaid: tuple[str, ...]  # what it does and a job file does not say

    def parse(self, name: str, overrides: dict[str, Any] | None = None) -> ParsedJob:
        """The job, checked as every job file is."""
        return JobTable(Path(name), merge_sections(self.table, overrides or {})).parse()


def describe(graphs: Sequence[Graph], ranks: int, platform: Platform, name: str) -> CodeJob:
    """The job that `ranks` ranks run which these steps are captured from: one step, or those of a pipeline's stages."""
    found = [StepProducts(g) for g in graphs]
    stages = [step_layers(f) for f in found]
    counts = [counted(g, layers) for g, layers in zip(graphs, stages, strict=True)]
    spread = code_ranks(graphs[0], stages[0])
    layers = add_stages(graphs, stages, [n for n, _ in counts], spread)
    return _Description(found, stages, layers, counts[0][1], spread, ranks, platform, name).job()


@dataclass
class _Description:
    found: list[StepProducts]
    stages: list[tuple[Layer, ...]]
    layers: int
    microbatches: int
    spread: CodeRanks
    ranks: int
    platform: Platform
    name: str

    def job(self) -> CodeJob:
        self.assumed: list[str] = []
        self.unsaid: list[str] = list(self.spread.notes)
        self.layer = self.stages[0][0]
        self.rotates = rotates(self.found[0], self.layer)
        self.traits = code_traits(self.found[0], self.stages[0], self.rotates)
        self.table = {
            "name": self.name,
            "model": self._model(),
            "training": self._training(),
            "parallel": self._parallel(),
            "framework": self._framework(),
            "cluster": {"platform": self.platform.key},
        }
        overlap = {} if self.spread.reduces_beside else {"overlap": {"gradients": False}}
        self._check_parameters()
        return CodeJob(self.table | overlap, tuple(self.assumed), tuple(dict.fromkeys(self.unsaid)))

    # ---- [model]

    def _model(self) -> dict[str, Any]:
        x, s, a = self.layer, self.spread, self.layer.attention
        split = s.tp * (s.cp if s.ulysses else 1)
        traits = self.traits
        vocab, tied, positions, most = self._ends()
        out: dict[str, Any] = {
            "hidden": x.hidden,
            "layers": self.layers,
            "heads": a.heads * split,
            "kv_heads": x.kv_heads * split,
            "head_dim": a.dim,
            "ffn": x.down.inputs * s.tp,
            "vocab": vocab,
            "activation": self._activation(),
            "norm": traits.norm or self._assume("norm", "rmsnorm", "compiled kernels do not show it"),
            "bias": x.proj.bias or x.down.bias,
            "tied": tied,
            "positions": positions,
        }
        out |= {"max_positions": most} if most else {}
        out |= {"window": a.window} if a.window and a.window < a.queries else {}
        if a.causal is None:
            self._assume("causal", True, "attention has a mask, which is not read")
        out |= {"causal": False} if a.causal is False else {}
        if a.value != a.dim:
            self.unsaid.append(f"values have {a.value} numbers a head, keys {a.dim}: a job's have as many")
        return out | self._experts()

    def _assume(self, key: str, value: Any, why: str) -> Any:
        self.assumed.append(f"{key} = {value}: {why}".replace("True", "true"))
        return value

    def _activation(self) -> str:
        found, gated = activation(self.found[0].graph, self.layer), self.layer.gated
        usual = "swiglu" if gated else "gelu"
        return found or str(self._assume("activation", usual, "its kernel does not show the function"))

    def _experts(self) -> dict[str, Any]:
        e, s = next((x.experts for x in self.stages[0] if x.experts), None), self.spread
        if e is None:
            return {}
        experts = e.experts or e.here * s.ep
        top = max(1, round(e.rows / self.layer.proj.rows))
        per = len(self.stages[0]) // self.microbatches
        dense = next(k for k, x in enumerate(self.stages[0][:per]) if x.experts)
        if s.ep > 1:
            self._assume("model.experts.top_k", top, "rows that reach a rank's experts per token of a rank")
        out = {"experts": experts, "top_k": top, "ffn": e.ffn}
        return {"experts": out | ({"dense_layers": dense} if dense else {})}

    def _ends(self) -> tuple[int, bool, str, int]:
        """Vocabulary, tied weights, positions and how many of them."""
        s, hidden = self.spread, self.layer.hidden
        head = next((p for stage in self.stages for x in stage for p in x.after if p.inputs == hidden), None)
        if head is None:
            graph = self.found[0].graph
            raise not_described(graph, f"no product with a vocabulary follows its {self.layers} layers")
        both = list(zip(self.found, self.stages, strict=True))
        holder = next(f for f, stage in both if any(x.after for x in stage))
        tables = [t for f, stage in both for t in embedding_tables(f, stage[0])]
        vocab = head.outputs * (s.tp if s.head_split else 1)
        token = _token_table(tables, vocab)
        if token and 0 < vocab - token.rows < PADDED:
            self._assume("vocab", vocab, f"compiled code pads {token.rows:,} rows to so many")
        if s.tp > 1 and not s.head_split:
            self.unsaid.append(f"the vocabulary head is not split over the {s.tp} tensor-parallel ranks: a job's is")
        if token is None:
            self._assume("tied", False, "no table of the vocabulary is looked up")
        learned = [t for t in tables if t is not token and t.rows < vocab and t.rows >= self.layer.attention.queries]
        tied = token is not None and bool(token.storages & holder.storages_behind(head.weight, head.place))
        positions = "rope" if self.rotates else "learned" if learned else "none"
        return vocab, tied, positions, learned[0].rows if positions == "learned" else 0

    # ---- the other sections

    def _training(self) -> dict[str, Any]:
        a, s, t = self.layer.attention, self.spread, self.traits
        dp = self.ranks // (s.tp * s.pp * s.cp)
        if t.frozen:
            share = f"{t.frozen / 2:.0%}"
            self.unsaid.append(f"{share} of the layers' gradients are not computed (frozen weights): a job trains all")
        heads = [p for x in self.stages[0] for p in x.after]
        rows = sum(p.rows for p in heads) / (self.microbatches * self.layer.proj.rows) if heads else 1.0
        if rows < 0.9:
            self.unsaid.append(f"the vocabulary head takes {rows:.0%} of the tokens: a job's takes all")
        return {
            "sequence": a.queries * (1 if s.ulysses else s.cp),
            "micro_batch": a.batch,
            "global_batch": a.batch * dp * self.microbatches,
            "precision": t.precision,
            "optimizer": t.optimizer,
            "recompute": t.recompute,
        }

    def _parallel(self) -> dict[str, Any]:
        s = self.spread
        out: dict[str, Any] = {"gpus": self.ranks}
        for key in ("tp", "pp", "virtual", "cp", "ep"):
            out |= {key: getattr(s, key)} if getattr(s, key) > 1 else {}
        out |= {"sequence_parallel": s.sequence_parallel} if s.tp > 1 else {}
        out |= {"schedule": s.schedule} if s.schedule else {}
        out |= {"layers_as": list(s.layers_as)} if s.layers_as else {}
        out |= {"zero": s.zero} if s.zero else {}
        out |= {"fsdp": True} if s.fsdp else {}
        dp = self.ranks // (s.tp * s.pp * s.cp)
        out |= {"shard": s.shard} if s.zero and s.shard != dp * s.cp else {}
        if dp > 1 and not s.reduce_bytes:
            self.unsaid.append(f"gradients are not reduced over the {dp} data-parallel ranks in this step: a job's are")
        return out

    def _framework(self) -> dict[str, Any]:
        t, s = self.traits, self.spread
        usual = framework(FRAMEWORK, self.platform.gpu)
        sent = s.reduce_bytes or t.gradient_bytes
        said: dict[str, Any] = {
            "attention": self.layer.attention.style,
            "compiled": t.compiled,
            "fused_norms": t.fused_norms,
            "fused_loss": t.fused_loss,
            "dropout": t.dropout,
            "gradient_bytes": t.gradient_bytes,
            "reduce_bytes": sent,
            "gather_bytes": s.gather_bytes or usual.gather_bytes,
            "host": t.host,
        }
        out = {"name": FRAMEWORK} | {k: v for k, v in said.items() if v != getattr(usual, k)}
        if s.buckets and not s.fsdp:
            whole = t.parameters * t.gradient_bytes
            out["bucket_MB"] = round(whole / s.buckets / MB, 1)
        return out

    def _check_parameters(self) -> None:
        """Say where the described model has not the parameters that the code has."""
        s = self.spread
        if s.tp > 1 or s.pp > 1 or s.ep > 1:
            return
        here = self.traits.parameters * (s.shard if s.fsdp else 1)
        model = JobTable(Path(self.name), self.table).parse(checked=False).job.model
        if here and abs(model.parameters / here - 1) > OFF:
            self.unsaid.append(f"the code has {here:,} parameters, the described model {model.parameters:,}")


def _token_table(tables: Sequence[EmbeddingTable], vocab: int) -> EmbeddingTable | None:
    """The table of the vocabulary, whole or a rank's part of it."""
    whole = next((t for t in tables if 0 <= vocab - t.rows < PADDED), None)
    return whole or next((t for t in tables if vocab % t.rows == 0), None)
