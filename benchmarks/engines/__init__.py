"""Inference servers without drafts, with their own drafter and with ours: the run for a machine with a GPU."""
