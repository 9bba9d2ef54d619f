"""Random effects: what differs from run to run and from step to step, as draws."""
