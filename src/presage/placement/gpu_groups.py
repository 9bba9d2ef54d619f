"""Groups of GPUs that wait for each other in every layer: how they are formed out of a fleet.

A group pays once for all its slow GPUs, so slow ones belong together. Parts of a node, as large as a tensor-parallel
group, are cut from its GPUs in the order of their speeds, and groups from the parts likewise: of all ways to form them
this leaves the k-th slowest group quickest, for every k at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.placement.fleet import GpuFleet
from presage.prediction.draws.step_model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class GroupSizes:
    """What a job needs: so many groups of so many GPUs, in parts that stay within a node."""

    groups: int
    together: int
    part: int

    @staticmethod
    def of(shape: StepModel, fleet: GpuFleet, keep_nodes: bool = True) -> GroupSizes:
        """What a job needs of a fleet; `keep_nodes`: tensor-parallel groups stay within nodes."""
        groups, tp = shape.replicas * shape.stages, gcd(shape.job.parallel.tp, shape.together)
        if len(fleet) < groups * shape.together:
            raise PresageError(
                f"{len(fleet)} speeds, but the job has {groups * shape.together} GPUs: give one for each"
            )
        part = min(tp, _usual_node(fleet)) if keep_nodes and fleet.known_nodes else 1
        while tp % part:  # of a group larger than a node: what divides it
            part -= 1
        return GroupSizes(groups, shape.together, part)

    @property
    def parts(self) -> int:
        """Parts needed in all."""
        return self.groups * self.together // self.part

    def enough(self, parts: Ints) -> Ints:
        """The parts themselves, if they suffice."""
        if len(parts) < self.parts:
            raise PresageError(
                f"{self.parts} groups of {self.part} GPUs within a node are needed, and the nodes have {len(parts)}: "
                "give more nodes, or allow groups across nodes (--any-node)"
            )
        return parts


def _usual_node(fleet: GpuFleet) -> int:
    sizes, count = np.unique([len(m) for m in fleet.members.values()], return_counts=True)
    return int(sizes[count.argmax()])


def best_groups(fleet: GpuFleet, sizes: GroupSizes) -> Ints:
    """[group, GPU], the slowest first; the slowest parts are left over."""
    parts = sizes.enough(np.concatenate([_cut(fleet, m, sizes.part) for m in fleet.members.values()]))
    order = np.argsort(_slowest(fleet, parts), kind="stable")[: sizes.parts][::-1]
    return parts[order].reshape(sizes.groups, sizes.together)


def worst_groups(fleet: GpuFleet, sizes: GroupSizes) -> Ints:
    """As many groups as can be have a slow GPU each."""
    parts = sizes.enough(np.concatenate([_one_slow_each(fleet, m, sizes.part) for m in fleet.members.values()]))
    order = np.argsort(-_slowest(fleet, parts), kind="stable")[: sizes.parts]
    return parts[order].reshape(-1, sizes.groups, sizes.part).transpose(1, 0, 2).reshape(sizes.groups, -1)


def given_groups(sizes: GroupSizes) -> Ints:
    """As the ranks are numbered: neighbours are together."""
    return np.arange(sizes.groups * sizes.together).reshape(sizes.groups, sizes.together)


def random_groups(fleet: GpuFleet, sizes: GroupSizes, rng: np.random.Generator) -> Ints:
    """Nodes in any order; where none are known, GPUs."""
    members = [m[: len(m) // sizes.part * sizes.part] for m in fleet.members.values()]
    if len(members) == 1:
        return rng.permutation(len(fleet))[: sizes.groups * sizes.together].reshape(sizes.groups, sizes.together)
    gpus = np.concatenate([members[i] for i in rng.permutation(len(members))])
    sizes.enough(gpus.reshape(-1, sizes.part))
    return gpus[: sizes.groups * sizes.together].reshape(sizes.groups, sizes.together)


def _slowest(fleet: GpuFleet, parts: Ints) -> Floats:
    return np.asarray(fleet.factors[parts].max(axis=1))


def _cut(fleet: GpuFleet, gpus: Ints, part: int) -> Ints:
    """A node's parts, by speed; its slowest GPUs are left over."""
    order = gpus[np.argsort(fleet.factors[gpus], kind="stable")]
    return order[: len(order) // part * part].reshape(-1, part)


def _one_slow_each(fleet: GpuFleet, gpus: Ints, part: int) -> Ints:
    """A node's parts, each with one of its slowest GPUs."""
    order = gpus[np.argsort(-fleet.factors[gpus], kind="stable")]
    return order[: len(order) // part * part].reshape(part, -1).T
