"""Random effects of a per-operation table: fitted on some of its steps, drawn as durations, told as numbers."""
