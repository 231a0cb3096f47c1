"""Ranks of mpiexec save one checkpoint by Megatron-core: make_megatron.py FOLDER.

Four ranks: tensor-parallel 2, data-parallel 2. FOLDER is that of a training, and
beside the iteration in it is what Megatron-core itself loads of it, in full.
"""

import sys
import warnings
from pathlib import Path


def main():
    from tests.interop.programs.torch_world import comm, start_torch, stop_torch

    warnings.simplefilter("ignore")
    start_torch()
    import torch

    # Megatron moves small objects to the GPU to talk about them; there may be none.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    from megatron.core import dist_checkpointing

    folder = Path(sys.argv[1])
    iteration = folder / "iter_0000100"
    if comm.rank == 0:
        iteration.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("100")
    comm.Barrier()
    pickle_members_by_value()
    dist_checkpointing.save(state(torch, comm.rank), str(iteration))
    comm.Barrier()
    found = loaded(torch, dist_checkpointing, iteration, comm.rank)
    if comm.rank == 0:
        torch.save(found, folder / "expected.pt")
        print("made", flush=True)
    comm.Barrier()
    stop_torch()


def whole_tensors(torch):
    """Return every tensor as Megatron names it, with the axis that TP splits."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {
        "embedding.word_embeddings.weight": (drawn(96, 16).bfloat16(), 0),
        # Layers are stacked along an axis before those of the weight.
        "decoder.layers.mlp.linear_fc1.weight": (drawn(3, 32, 16).bfloat16(), 1),
        "decoder.layers.mlp.linear_fc2.weight": (drawn(3, 16, 32).bfloat16(), 2),
        "decoder.final_layernorm.weight": (drawn(16).bfloat16(), None),
    }
    for name, (weight, axis) in list(tensors.items()):
        for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
            state = drawn(*weight.shape)
            tensors[f"optimizer.state.{slot}.{name}"] = (state, axis)
    return tensors


def pickle_members_by_value():
    """Let enumerations be pickled as by Python 3.11.4 and later.

    Megatron-core itself cannot load what older ones write.
    """
    import enum
    import signal

    for kind in (enum.Enum, signal.Signals):
        kind.__reduce_ex__ = lambda self, _: (type(self), (self._value_,))


def state(torch, rank):
    """Return what one rank of the training saves."""
    import argparse
    import signal

    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.transformer.enums import AttnBackend

    tensor_rank, data_rank = rank % 2, rank // 2
    saved = {}
    for name, (tensor, axis) in whole_tensors(torch).items():
        stacked = tensor.ndim == 3
        split = [] if axis is None else [(axis, tensor_rank, 2)]
        part = tensor if axis is None else tensor.chunk(2, axis)[tensor_rank]
        replica = rank if axis is None else data_rank
        for layer in range(len(tensor) if stacked else 1):
            place = [(0, layer, len(tensor)), *split] if stacked else split
            saved[f"{name} {layer}"] = ShardedTensor.from_rank_offsets(
                name,
                (part[layer] if stacked else part).clone(),
                *place,
                prepend_axis_num=int(stacked),
                replica_id=replica,
            )
    saved["rng_state"] = ShardedObject(
        "rng_state",
        [{"random": (3, (1, 2), None), "torch": torch.arange(16, dtype=torch.uint8)}],
        (1, 2),
        (0, tensor_rank),
        replica_id=data_rank,
    )
    saved["args"] = argparse.Namespace(
        hidden_size=16,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.flash,
        exit_signal=signal.SIGTERM,
        save=Path("/runs/one"),
        betas=(0.9, 0.95),
    )
    saved["iteration"] = 100
    saved["opt_param_scheduler"] = {"max_lr": 1e-3, "num_steps": 1600}
    return saved


def loaded(torch, dist_checkpointing, iteration, rank):
    """Return what Megatron-core loads of each tensor as a whole; collective."""
    wanted = {
        name: dist_checkpointing.ShardedTensor.from_rank_offsets(
            name, torch.zeros_like(tensor), replica_id=rank
        )
        for name, (tensor, _) in whole_tensors(torch).items()
    }
    found = dist_checkpointing.load(wanted, str(iteration))
    for name, (tensor, _) in whole_tensors(torch).items():
        assert torch.equal(found[name], tensor), name
    return found


# Megatron starts a helper that imports this file anew and must not start MPI.
if __name__ == "__main__":
    main()
