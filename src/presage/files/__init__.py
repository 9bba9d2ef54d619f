"""Reading files within limits, and writing them atomically."""

from presage.files.writing import write_whole

__all__ = ["write_whole"]
