"""A PyTorch training step as a Graph, captured on a machine with no GPU."""

from presage.capture.load import load, load_cases
from presage.capture.run import capture

__all__ = ["capture", "load", "load_cases"]
