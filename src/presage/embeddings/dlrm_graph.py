"""The step of one rank of a recommendation model: dense layers as ops, embeddings as ops timed by the sharding plan.

The order is that of TorchRec: the dense features go first, then lookups, the exchange of pooled rows, interaction, top
layers; backward in the opposite order. Around the exchange pooled rows are copied as its comm_ops.py does (1.8): into
the buffer that is sent, and side by side once received; gradients are cut by rank, put together and divided. Pipelined
(TrainPipelineSparseDist), the indices of the next batch are sent beside this one's work: sizes before the forward pass,
lengths and indices between forward and backward. All collectives share one communicator, as they do there, so they run
one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.dlrm_layers import (
    ENGINE,
    AutogradTape,
    bce_loss,
    concatenate,
    cross,
    dense_update,
    dot_interaction,
    mlp,
)
from presage.errors import PresageError
from presage.graph.graph import Graph, Ref

GROUP = "dp"
MEMORY_COPY = "memcpy"
SPARSE = "(sparse)"  # the module of ops whose times come from the plan; the rest of their module says which
DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WIRE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LOOKUP = "fbgemm::split_embedding_codegen_lookup_function"
ALL_TO_ALL = "c10d::alltoall_base_"


@dataclass(frozen=True)
class EmbeddingCounts:
    """Columns and lookups of table- and column-wise, row-wise and data-parallel tables."""

    placed: int  # columns
    by_rows: int
    replicated: int
    bags: int  # that a rank sends, to all ranks together
    lookups: int  # in them
    replicas: int  # weights that all ranks hold
    received: int = 0  # columns of pooled rows that a sample gets, each part of rows counted
    summed: int = 0  # numbers that a rank gets from its node to sum, where the exchange has two tiers


def dlrm_graph(job: DlrmJob, sparse: EmbeddingCounts, *, train: bool = True) -> Graph:
    """One rank's step, before its dense gradients are shared; or its forward pass alone."""
    return DlrmStep(job, sparse).graph(train=train)


class DlrmStep:
    """Records a rank's step; subclasses run it with other kernels."""

    def __init__(self, job: DlrmJob, sparse: EmbeddingCounts) -> None:
        self.job, self.sparse = job, sparse
        self.tape = AutogradTape(DTYPES[job.precision], tf32=job.precision == "tf32")
        self.rows = -(-job.batch // job.ranks)
        self.width = sum(t.dim for t in job.tables)
        self.wire = WIRE_DTYPES[job.wire]
        counts = ((1, "int64"), (3 * job.ranks, "int64"), (sparse.bags, job.index), (sparse.lookups, job.index))
        self.done, self.sizes, self.lengths, self.coming = (self.tape.input((n,), d, nbytes=0) for n, d in counts)
        self.ready = self.tape.input((sparse.lookups,), job.index, nbytes=0)
        self.rows_ahead = self.tape.input((1,), "float32", nbytes=0)
        self.pooled = self.tape.input((self.rows, sparse.placed), self.wire, nbytes=0)  # of the mean rank
        self.partial = self.tape.input((self.rows * job.ranks, sparse.by_rows), self.wire, nbytes=0)

    def graph(self, *, train: bool = True) -> Graph:
        job, tape = self.job, self.tape
        if job.pipelined:
            self._copy_next()
            self._send_sizes()
        else:
            self._copy_next()
            self._send_sizes(wait=True)
            self._send_indices()
        dense = tape.input((self.rows, job.dense), "float32")
        kinds, embedded = ([], 0) if not job.system.bottom_beside_exchange else self._looked_up()
        bottom = mlp(tape, dense, list(job.bottom), "bottom", first=True)
        kinds, embedded = (kinds, embedded) if kinds else self._looked_up()
        self._received(embedded, kinds)
        crossed = self._interaction(bottom, tape.cast(embedded, tape.dtype))
        bce_loss(tape, mlp(tape, crossed, list(job.top), "top", last_plain=True))
        if job.pipelined:
            self._send_indices()
        if not train:
            return tape.build(source=job.name)
        tape.backward()
        dense_update(tape, job.optimizer)
        if self.sparse.replicated:
            self._op("replicas.update", LOOKUP + "_dense", reads=[], writes=[])
        return tape.build(source=job.name)

    def _op(self, which: str, name: str, reads: list[int], writes: list[int], *within: str, sync: bool = False) -> None:
        """An op of the embeddings; collectives are on the communicator's stream."""
        tape, sends = self.tape, name.startswith("c10d")
        before, tape.module = tape.module, f"{SPARSE}{which}"
        inputs = [Ref(t) for t in dict.fromkeys([*writes, *reads])]
        ahead = which in ("copy", "cache") and self.job.pipelined
        where = GROUP if sends else MEMORY_COPY if ahead else ""
        tape.emit(name, inputs, writes, *within, writes=writes, stream=where, group=GROUP if sends else "", sync=sync)
        tape.module = before

    def _sends(self) -> bool:
        return self.job.ranks > 1 and self.sparse.placed + self.sparse.by_rows > 0

    def _copy_next(self) -> None:
        """The batch after next, from the host; and rows that the cache lacks, where they are fetched ahead."""
        self._op("copy", "aten::copy_", [], [self.coming], "aten::to", "aten::_to_copy")
        if self.job.system.cache_load_factor < 1 and self.job.system.prefetch:
            self._op("cache", "fbgemm::lxu_cache_populate", [], [self.rows_ahead])

    def _send_sizes(self, wait: bool = False) -> None:
        if self._sends():
            here = self.tape.add_tensor(self.tape.of(self.coming).storage, (1,), self.job.index)
            self._op("sizes", ALL_TO_ALL, [here] if wait else [], [self.sizes])
            if wait:
                self.tape.emit("aten::item", [Ref(self.sizes)], [], kernels=False, sync=True)

    def _send_indices(self) -> None:
        if self._sends():
            self._op("lengths", ALL_TO_ALL, [], [self.lengths])
            self._op("indices", ALL_TO_ALL, [self.coming], [self.ready])

    def _columns(self, tensor: int, width: int) -> int:
        """A view of `width` columns of a rank's samples, as one block."""
        return self.tape.add_tensor(self.tape.of(tensor).storage, (self.rows, width), self.wire)

    def _looked_up(self) -> tuple[list[str], int]:
        """Lookups, and the exchange that brings the pooled rows of this rank's samples."""
        tape, sparse, many = self.tape, self.sparse, self.job.ranks > 1
        tape.module = "embeddings"
        embedded = tape.activation((self.rows, self.width), "float32")
        kinds = [
            k
            for k, there in (("placed", sparse.placed), ("rows", sparse.by_rows), ("replicas", sparse.replicated))
            if there
        ]
        if not kinds:
            raise PresageError("a recommendation model without embedding tables: there is nothing to look up")
        for kind in kinds:
            self._op(f"{kind}.forward", LOOKUP, [self.ready], [self.pooled, self.partial], "TBE::forward")
        if sparse.placed and many:
            self._encode(self.pooled)
            tape.emit("aten::copy_", [Ref(self.pooled)] * 2, [self.pooled], "All2All_Pooled_Req", writes=[self.pooled])
            self._op("output", ALL_TO_ALL, [self.pooled], [self._columns(embedded, sparse.placed)])
        if sparse.by_rows and many:
            self._op(
                "scatter", "c10d::_reduce_scatter_base_", [self.partial], [self._columns(embedded, sparse.by_rows)]
            )
        return kinds, embedded

    def _received(self, embedded: int, kinds: list[str]) -> None:
        """Pooled rows side by side: those of the ranks that sent them, then those of the features."""
        tape, placed = self.tape, self.sparse.placed
        tape.module = "embeddings"
        if placed and self.job.ranks > 1:
            came = self._columns(embedded, placed)
            self._decode(came)
            whole = tape.add_tensor(tape.of(embedded).storage, (self.rows, placed), "float32")
            tape.emit("aten::cat", [[Ref(whole)], 1], [whole], "All2All_Pooled_Wait", writes=[whole])
        tape.emit("aten::cat", [[Ref(embedded)], 1], [embedded], writes=[embedded])
        tape.note(lambda: self._embedded_back(embedded, kinds))

    def _embedded_back(self, embedded: int, kinds: list[str]) -> None:
        tape, many = self.tape, self.job.ranks > 1
        gradient = tape.cast(tape.gradients.pop(embedded), "float32")
        flat = tape.activation((self.rows, self.width), "float32")
        tape.emit("aten::cat", [[Ref(gradient)], 1], [flat], ENGINE + "SplitWithSizesBackward0")
        if self.sparse.placed and many:
            self._send_gradient(self._columns(flat, self.sparse.placed))
        if self.sparse.by_rows and many:
            self._op("gather", "c10d::_allgather_base_", [self._columns(flat, self.sparse.by_rows)], [self.partial])
        reads = [self.pooled, self.partial, flat, self.ready]
        for kind in sorted(kinds, key=lambda k: k != "replicas"):  # those that wait for nobody first
            self._op(f"{kind}.backward", LOOKUP + "Backward", reads, [self.done], "TBE::backward")
            if kind == "replicas" and many:
                weights = tape.input((self.sparse.replicas,), "float32", nbytes=0)
                self._op("replicas", "c10d::allreduce_", [self.done], [weights])

    def _send_gradient(self, flat: int) -> None:
        """Gradients of pooled rows, put together by rank and sent; the receiver divides them by the ranks."""
        tape, node = self.tape, ENGINE + "All2All_Pooled_WaitBackward"
        width = tape.of(flat).shape[1]
        for rank in range(min(self.job.ranks, width)):
            columns = width * (rank + 1) // self.job.ranks - width * rank // self.job.ranks
            if columns:
                part = tape.add_tensor(tape.of(flat).storage, (self.rows, columns), "float32", 0, (width, 1))
                own = tape.activation((self.rows, columns), "float32")
                tape.emit("aten::copy_", [Ref(own), Ref(part)], [own], node, "aten::contiguous", writes=[own])
        tape.emit("aten::cat", [[Ref(flat)]], [flat], node, writes=[flat])
        self._encode(flat, node)
        self._op("gradient", ALL_TO_ALL, [flat], [self.pooled])
        self._decode(self.pooled, node)
        inputs = [Ref(self.pooled), float(self.job.ranks)]
        tape.emit("aten::div_", inputs, [self.pooled], node, writes=[self.pooled], overload="Scalar")

    def _encode(self, sent: int, *within: str) -> None:
        """Numbers in what the wire carries (TorchRec's quantised communication): clamped to its range, then cast."""
        tape = self.tape
        if self.wire != "float32":
            whole = tape.activation(tape.of(sent).shape, "float32")
            if self.wire == "float16":
                tape.emit("aten::clamp", [Ref(whole), -65504.0, 65504.0], [whole], *within)
            tape.emit("aten::copy_", [Ref(sent), Ref(whole)], [sent], *within, "aten::to", writes=[sent])

    def _decode(self, came: int, *within: str) -> None:
        """Numbers that came, as they are computed with."""
        tape = self.tape
        if self.wire != "float32":
            whole = tape.activation(tape.of(came).shape, "float32")
            tape.emit("aten::copy_", [Ref(whole), Ref(came)], [whole], *within, "aten::to", writes=[whole])

    def _interaction(self, dense: int, sparse: int) -> int:
        job, tape = self.job, self.tape
        if job.interaction == "dot":
            if {t.dim for t in job.tables} != {job.bottom[-1]}:
                raise PresageError(
                    f"{job.name}: a dot interaction needs tables as wide as the bottom layers' output, {job.bottom[-1]}"
                )
            return dot_interaction(tape, dense, sparse)
        joined = concatenate(tape, [dense, sparse], "interaction")
        return cross(tape, joined, job.cross_layers, job.cross_rank) if job.interaction == "dcn" else joined
