"""FBGEMM's table-batched embedding lookups: tables, how their rows repeat, and what forward and backward take."""

from presage.costs.lookups.lookup_model import EmbeddingModel, embedding_model
from presage.costs.lookups.row_reuse import Lookups, Reuse
from presage.costs.lookups.table import Table

__all__ = ["EmbeddingModel", "Lookups", "Reuse", "Table", "embedding_model"]
