"""A tiny training whose state at any step is known, so that a restart can be judged."""

import numpy as np

from mpickpt import CheckpointManager, PerRank, Replicated, Sharded, open_checkpoint

ROWS = 12


class Training:
    """One rank of it; what it holds depends on rank, size and step alone."""

    def __init__(self, comm=None, rows=ROWS):
        self.rank = 0 if comm is None else comm.Get_rank()
        self.size = 1 if comm is None else comm.Get_size()
        self.block = np.full((rows, 2), -1.0)
        self.scale = np.full(3, -1.0)
        self.own = np.full(2, -1)
        self.step = -1

    def state(self):
        return {
            "model": {"w": Sharded.block(self.block), "scale": Replicated(self.scale)},
            "own": PerRank(self.own, on_resize="first"),
            "step": self.step,
        }

    def train(self, step):
        """Do one step."""
        self.step = step
        self.block[...] = step + self.rank / 10
        self.scale[...] = step
        self.own[...] = 100 * step + self.rank

    def adopt(self, restored):
        """Take over what is not filled in place."""
        self.step = restored.state["step"]

    def require_step(self, step):
        """Assert that the state is that of a step."""
        assert self.step == step
        assert (self.block == step + self.rank / 10).all()
        assert (self.scale == step).all()
        assert (self.own == 100 * step + self.rank).all()


def manager_of(run, comm, training, **options):
    """Return a manager of the training's state."""
    return CheckpointManager(run, comm, state=training.state, **options)


def train(run, comm=None, *, steps, each=lambda manager, step: None, **options):
    """Resume, train up to `steps` and return (first step, last step, exit code)."""
    training = Training(comm)
    with manager_of(run, comm, training, **options) as manager:
        restored = manager.restore_latest()
        if restored is not None:
            training.adopt(restored)
            training.require_step(restored.step)
        first = step = manager.next_step
        for step in range(first, steps):
            training.train(step)
            each(manager, step)
            manager.save_if_due(step)
            if manager.should_stop:
                break
    return first, step, manager.exit_code


def saved_step(path):
    """Return the step whose arrays a checkpoint holds, all of them."""
    with open_checkpoint(path) as checkpoint:
        values = np.floor(checkpoint["model/w"][...])
    assert (values == values.flat[0]).all()
    return int(values.flat[0])
