"""Jobs: a model's configuration, a platform and how the work is spread, as steps of all ranks."""
