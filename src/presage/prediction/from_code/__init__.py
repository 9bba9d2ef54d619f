"""From a captured transformer to the job file that describes it, and how far the two predictions agree."""
