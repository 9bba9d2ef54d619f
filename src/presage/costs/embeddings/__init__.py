"""FBGEMM's table-batched embedding lookups: tables, how their rows repeat, and what forward and backward take."""

from presage.costs.embeddings.model import EmbeddingModel, embedding_model
from presage.costs.embeddings.reuse import Lookups, Reuse
from presage.costs.embeddings.table import Table

__all__ = ["EmbeddingModel", "Lookups", "Reuse", "Table", "embedding_model"]
