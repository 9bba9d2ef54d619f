"""Files: read within limits whatever is in them, written whole or not at all."""

from presage.files.writing import write_whole

__all__ = ["write_whole"]
