"""The step of one rank as fused kernels run it (HugeCTR's): bias, ReLU and their gradients inside the GEMMs, one kernel
for the element-wise part of a cross layer each way, weights cast once, gradients kept in half precision.

The order is that of HugeCTR's pipeline: lookups first; data-parallel lookups and the bottom layers while pooled rows
travel; gradients of pooled rows travel while the bottom layers go back; dense gradients are all-reduced in one piece
beside the tables' updates; keys of the next batch are sent between the passes. Kernels run one after the other even
where HugeCTR has them on several streams: they share the same memory and the same cores.
"""

from __future__ import annotations

from presage.embeddings.dlrm_graph import ALL_TO_ALL, DTYPES, GROUP, LOOKUP, DlrmStep
from presage.errors import PresageError
from presage.graph.graph import Graph, Ref


class FusedStep(DlrmStep):
    """Records the step; `graph(train=False)` only its forward pass."""

    def graph(self, *, train: bool = True) -> Graph:
        job, tape = self.job, self.tape
        self._dense_weights()
        self._copy_next()
        beside = job.system.bottom_beside_exchange
        early = [] if beside else self._bottom()
        self._lookups("placed", "rows")
        self._exchange()
        bottom = self._bottom() if beside else early
        joined = self._join(bottom[-1])
        crossed = self._cross(joined)
        top = self._layers(crossed[-1][1] if crossed else joined, job.top, "top")
        self._kernel("loss", "aten::sigmoid", [top[-1]], [top[-1]])
        self._send_indices()
        if not train:
            return tape.build(source=job.name)
        tape.phase = "backward"
        gradient = self._layers_back(top, "top")
        gradient = self._cross_back(gradient, joined, crossed)
        self._share_gradient(gradient)
        if not job.system.one_reduce:
            self._reduce(self.count - self.bottom_count)
        self._layers_back(bottom, "bottom", first=True)
        self._reduce(self.count if job.system.one_reduce else self.bottom_count)
        self._updates()
        tape.phase = "optimizer"
        states = [self._flat("float32") for _ in range(2)]
        self._dense_update(states)
        if self.sparse.replicated:
            self._op("replicas.update", LOOKUP + "_dense", reads=[], writes=[])
        return tape.build(source=job.name)

    # ---- kernels

    def _dense_update(self, states: list[int]) -> None:
        """One kernel of the framework's own, so that types of number differ at no cost but their bytes."""
        tape, read = self.tape, [self.gradients, *states]
        tape.module = "update"
        moved = [float(sum(tape.of(t).nbytes for t in some)) for some in (read, states)]
        tape.emit("fused::pointwise", [[Ref(t) for t in read], *moved], states, writes=states)

    def _kernel(self, module: str, name: str, reads: list[int], writes: list[int]) -> None:
        self.tape.module = module
        reads = writes + reads if name == "aten::copy_" else reads
        self.tape.emit(name, [Ref(t) for t in reads], writes, writes=[t for t in writes if t in reads])

    def _dense_weights(self) -> None:
        """Tensors of all dense weights and biases, in both precisions, and of their gradients."""
        job, width = self.job, self.width + self.job.bottom[-1]
        crossed = job.cross_layers * width * (2 * job.cross_rank + 1) if job.interaction == "dcn" else 0
        bottom, top = (
            sum((inner + 1) * outer for inner, outer in zip((first, *widths), widths, strict=False))
            for first, widths in ((job.dense, job.bottom), (width, job.top))
        )
        total = bottom + crossed + top
        self.count, self.bottom_count = total, bottom
        self.master = self._flat("float32")
        self.cast_weights = self._flat(self.tape.dtype)
        self.gradients = self._flat(DTYPES[job.system.gradient])

    def _flat(self, dtype: str) -> int:
        return self.tape.input((self.count,), dtype)

    def _product(self, module: str, x: int, width: int, *, added: int | None = None, bias: bool = True) -> int:
        """x @ W.t(), its bias and activation in the same kernel; `added` is read in its epilogue."""
        tape = self.tape
        tape.module = module
        inner = tape.of(x).shape[1]
        weight, out = tape.input((inner, width), tape.dtype, nbytes=0), tape.activation((self.rows, width))
        if added is None and bias:
            added = tape.input((width,), tape.dtype, nbytes=0)
        if added is None:
            tape.emit("aten::mm", [Ref(x), Ref(weight)], [out])
        else:
            tape.emit("aten::addmm", [Ref(added), Ref(x), Ref(weight), 1, 1], [out])
        return out

    def _product_back(
        self, module: str, gradient: int, x: int, *, needs_input: bool = True, added: int | None = None
    ) -> int:
        """Gradients of a product: of its weight, and of its input."""
        tape = self.tape
        tape.module = module
        rows, (inner, width) = self.rows, (tape.of(x).shape[1], tape.of(gradient).shape[1])
        flipped = tape.add_tensor(tape.of(gradient).storage, (width, rows), tape.dtype, 0, (1, width))
        kept = tape.add_tensor(tape.of(self.gradients).storage, (width, inner), tape.dtype)
        tape.emit("aten::mm", [Ref(flipped), Ref(x)], [kept])
        if not needs_input:
            return gradient
        return self._product(module, gradient, inner, added=added, bias=False)

    # ---- dense layers

    def _bottom(self) -> list[int]:
        """What needs no rows of other ranks: the cast of the weights, data-parallel lookups, the bottom layers."""
        self._kernel("weights", "aten::copy_", [self.master], [self.cast_weights])
        self._lookups("replicas")
        dense = self.tape.cast(self.tape.input((self.rows, self.job.dense), "float32"), self.tape.dtype)
        return self._layers(dense, self.job.bottom, "bottom")

    def _layers(self, x: int, widths: tuple[int, ...], name: str) -> list[int]:
        out = [x]
        for k, width in enumerate(widths):
            out.append(self._product(f"{name}.{k}", out[-1], width))
        return out

    def _layers_back(self, values: list[int], name: str, first: bool = False) -> int:
        gradient = values[-1]
        for k in range(len(values) - 2, -1, -1):
            gradient = self._product_back(f"{name}.{k}", gradient, values[k], needs_input=not (first and k == 0))
        return gradient

    def _cross(self, x: int) -> list[tuple[int, int, int, int]]:
        """Input, output, projection and gate of each cross layer: x0 * (W (V x) + b) + x."""
        out: list[tuple[int, int, int, int]] = []
        if self.job.interaction != "dcn":
            if self.job.interaction == "dot":
                raise PresageError("fused_dense has cat and dcn interactions: set fused_dense = false for dot")
            return out
        now = x
        for k in range(self.job.cross_layers):
            inner = self._product(f"cross.{k}.v", now, self.job.cross_rank, bias=False)
            gate = self._product(f"cross.{k}.w", inner, self.tape.of(x).shape[1])
            result = self.tape.activation(self.tape.of(x).shape)
            self._kernel(f"cross.{k}", "aten::addcmul", [now, x, gate], [result])
            out.append((now, result, inner, gate))
            now = result
        return out

    def _cross_back(self, gradient: int, start: int, layers: list[tuple[int, int, int, int]]) -> int:
        """One kernel gives the gate's gradient and adds to the start's; the input's is added in a GEMM."""
        tape = self.tape
        total = tape.activation(tape.of(start).shape)
        for k in range(len(layers) - 1, -1, -1):
            x, _, inner, gate = layers[k]
            to_gate = tape.activation(tape.of(start).shape)
            self._kernel(f"cross.{k}", "aten::addcmul", [gradient, start, gate, total], [to_gate, total])
            back = self._product_back(f"cross.{k}.w", to_gate, inner)
            gradient = self._product_back(f"cross.{k}.v", back, x, added=gradient)
        return gradient

    # ---- embeddings

    def _lookups(self, *kinds: str) -> None:
        there = {"placed": self.sparse.placed, "rows": self.sparse.by_rows, "replicas": self.sparse.replicated}
        for kind in kinds:
            if there[kind]:
                self._op(f"{kind}.forward", LOOKUP, [self.ready], [self.pooled, self.partial], "TBE::forward")

    def _exchange(self) -> None:
        """Pooled rows, whole or partial, to the ranks of their samples."""
        self.received = self.tape.activation((self.rows, max(1, self.sparse.received)), self.wire)
        if self.sparse.placed and self._sends():
            self._op("output", ALL_TO_ALL, [self.pooled], [self.received])
        if self.sparse.by_rows and self._sends():
            self._op("scatter", "c10d::_reduce_scatter_base_", [self.partial], [self.received])

    def _join(self, bottom: int) -> int:
        """Received rows are summed where tables are split by rows, and put beside the bottom layers' output."""
        tape = self.tape
        embedded = tape.activation((self.rows, self.width))
        if self.sparse.summed:
            inner = tape.input((self.sparse.summed,), self.wire, nbytes=0)
            self._kernel("embeddings", "aten::neg", [inner], [self.received])
        self._kernel("embeddings", "aten::neg", [self.received], [embedded])
        joined = tape.activation((self.rows, self.width + tape.of(bottom).shape[1]))
        tape.module = "interaction"
        tape.emit("aten::cat", [[Ref(bottom), Ref(embedded)], 1], [joined])
        return joined

    def _share_gradient(self, gradient: int) -> None:
        tape = self.tape
        split = tape.activation(tape.of(gradient).shape)
        self._kernel("interaction", "aten::neg", [gradient], [split])
        sent = tape.activation((self.rows, max(1, self.sparse.received)), self.wire)
        self._kernel("embeddings", "aten::neg", [split], [sent])
        if self.sparse.placed and self._sends():
            self._op("gradient", ALL_TO_ALL, [sent], [self.pooled])
        if self.sparse.by_rows and self._sends():
            self._op("gather", "c10d::_allgather_base_", [sent], [self.partial])
        self.shared = sent

    def _reduce(self, count: int) -> None:
        """An all-reduce of so many dense gradients."""
        tape = self.tape
        if self.job.ranks > 1:
            tape.module, of = "gradients", tape.of(self.gradients)
            one = tape.add_tensor(of.storage, (count,), of.dtype)
            tape.emit("c10d::allreduce_", [[Ref(one)]], [], writes=[one], stream=GROUP, group=GROUP)

    def _updates(self) -> None:
        reads, sparse = [self.pooled, self.partial, self.shared, self.ready], self.sparse
        if sparse.replicated:
            self._op("replicas.backward", LOOKUP + "Backward", [self.shared], [self.done], "TBE::backward")
            if self._sends():
                held = self.tape.input((sparse.replicas,), DTYPES[self.job.system.gradient], nbytes=0)
                self._op("replicas", "c10d::allreduce_", [self.done], [held])
        for kind, there in (("placed", sparse.placed), ("rows", sparse.by_rows)):
            if there:
                self._op(f"{kind}.backward", LOOKUP + "Backward", reads, [self.done], "TBE::backward")
