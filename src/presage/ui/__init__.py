"""The planners' page: two plans of a training job, their answers as controls move, and links that carry them."""
