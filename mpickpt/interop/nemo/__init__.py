"""Reads checkpoints of Megatron-Core and NeMo; needs neither, nor torch."""
