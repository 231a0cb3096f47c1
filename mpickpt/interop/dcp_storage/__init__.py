"""Storage of torch.distributed.checkpoint on top of ours."""
