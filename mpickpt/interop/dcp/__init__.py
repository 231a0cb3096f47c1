"""Reads checkpoints of torch.distributed.checkpoint; needs no torch."""
