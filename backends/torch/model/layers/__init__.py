"""Layers that take the place of a model's own: faster on its device, or with float32 logits."""
