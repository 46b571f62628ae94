"""Rollouts of reinforcement learning: the samples of the same prompts, epoch after epoch, recorded and replayed."""
