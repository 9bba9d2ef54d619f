"""Embedding tables of recommendation models: their index data, sharding over ranks, and whole DLRM steps."""

from presage.costs.lookups import EmbeddingModel, Lookups, Reuse, Table, embedding_model

__all__ = ["EmbeddingModel", "Lookups", "Reuse", "Table", "embedding_model"]
