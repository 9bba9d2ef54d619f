"""Reading files within limits, and writing them atomically."""

from presage.files.writing import check_new_folder, write_whole

__all__ = ["check_new_folder", "write_whole"]
