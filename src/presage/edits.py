"""All edits in one namespace: of steps (Graph -> Graph) and of replays of traces (Replay -> Replay)."""

from presage.whatif.edits import *  # noqa: F403
from presage.whatif.edits import __all__ as __all__
