"""Step time of a transformer job from its config: layers as ops, stages, pipeline, communication between replicas."""
