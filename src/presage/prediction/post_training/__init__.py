"""Reinforcement-learning steps: rollout by a decoding engine, log-probabilities, training, weights to the engine."""
