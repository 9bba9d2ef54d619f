"""What a run does about failures: restart, hot standby, elastic replicas, copies in memory, eviction."""

from __future__ import annotations

from dataclasses import dataclass

from presage.errors import PresageError

HOT_RESTART = 60.0  # seconds, assumed: a standby node is up, in the job and has its software loaded
PAUSE = 30.0  # seconds, assumed: the replicas that are left agree on who is


@dataclass(frozen=True, slots=True)
class Policy:
    """By default every failure stops the whole run, which restarts from its last checkpoint."""

    name: str = "restart"
    hot: int = 0  # standby nodes: a failure that costs a node restarts in `hot_restart` while one is ready
    hot_restart: float = HOT_RESTART
    replicas: int = 1  # more than 1: elastic, the other replicas go on without the failed one
    heal: float = 0.0  # seconds in which a replica is back once it has its nodes
    pause: float = PAUSE  # seconds in which all replicas stop, after a failure was noticed
    stored: int | None = None  # checkpoints are copies in memory, and after so many steps one goes to storage as well
    memory_lost: float = 0.0  # share of failures that destroy the copies in memory
    evict: int = 0  # failures after which a node is not taken back; 0: all are

    def __post_init__(self) -> None:
        if self.hot < 0 or self.replicas < 1 or not 0 <= self.memory_lost <= 1 or self.evict < 0:
            raise PresageError(f"policy {self.name}: nodes, replicas and shares cannot be negative")

    @property
    def elastic(self) -> bool:
        return self.replicas > 1
