"""mpiexec -n P python jax_processes.py COMMAND:ARGUMENT:... ...: jax.distributed.

`save` and `load` hold the same values on meshes of any number of processes and
devices; `local` saves arrays that each process has for itself; `train` goes on from
what is in a run directory and prints a digest. Rank 0 prints one line or two for each
command, when all ranks have found everything as it should be.
"""

import hashlib
import socket
import sys

import jax
import numpy as np
from mpi4py import MPI

N_DEVICES = 4  # of all processes

comm = MPI.COMM_WORLD
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", N_DEVICES // comm.size)


def start_jax():
    """Let the ranks be the processes of one JAX program."""
    if comm.size == 1:
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = comm.bcast(listener.getsockname()[1])
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=comm.size, process_id=comm.rank
    )


start_jax()

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import mpickpt  # noqa: E402
import mpickpt.jax  # noqa: E402
from mpickpt import CheckpointManager, PerRank  # noqa: E402


def on(mesh, values, *spec):
    """Return the global array of values that every process has whole."""
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: values[index]
    )


def mesh_of(text):
    rows, columns = map(int, text.split("x"))
    return Mesh(np.array(jax.devices()).reshape(rows, columns), ("x", "y"))


def expected():
    """Return the values, on every process."""
    return {
        "both": np.arange(8 * 12, dtype=np.float32).reshape(8, 12),
        "rows": np.arange(16).astype(jnp.bfloat16),
        "columns": np.arange(24).reshape(3, 8).astype(np.int8),
        "everywhere": np.linspace(0, 1, 5).astype(np.float32),
        "scalar": np.float32(0.1).reshape(()),
        "empty": np.zeros((0, 4), np.float16),
        "keys": np.arange(16, dtype=np.uint32).reshape(8, 2),
    }


SPECS = {
    "both": ("x", "y"),
    "rows": (("x", "y"),),
    "columns": (None, "y"),
    "everywhere": (),
    "scalar": (),
    "empty": ("x",),
    "keys": ("x",),
}


def global_state(mesh, values):
    state = {name: on(mesh, values[name], *spec) for name, spec in SPECS.items()}
    state["keys"] = jax.random.wrap_key_data(state["keys"], impl="threefry2x32")
    return {
        "arrays": state,
        "count": jnp.int32(values["both"].flat[1]),
        "own": PerRank(jax.random.key(comm.rank), on_resize="first"),
    }


def check(state, mesh):
    """Assert that each device has its part of what is expected."""
    for name, values in expected().items():
        array = state["arrays"][name]
        if name == "keys":
            assert str(jax.random.key_impl(array)) == "threefry2x32"
            array = jax.random.key_data(array)
        assert array.sharding.mesh == mesh, name
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()
    assert not state["count"].committed
    assert int(state["count"]) == 1


def say(text):
    comm.Barrier()
    if comm.rank == 0:
        print(text, flush=True)


def save(path, shape):
    state = global_state(mesh_of(shape), expected())
    mpickpt.save_sharded(mpickpt.jax.adapt(state), path, step=1, comm=comm)
    say("saved")


def load(path, shape, like_of="arrays"):
    mesh = mesh_of(shape)
    zeros = {name: np.zeros_like(values) for name, values in expected().items()}
    like = global_state(mesh, zeros)
    if like_of == "described":
        arrays = like["arrays"]
        like["arrays"] = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for name, a in arrays.items()
        }
    loaded = mpickpt.load_sharded(
        path, comm=comm, like=mpickpt.jax.adapt(like), reshard=True
    )
    state = mpickpt.jax.restore(loaded, like)
    check(state, mesh)
    own = int(jax.random.key_data(state["own"].data)[-1])
    say(f"same {comm.gather(own)}")


def local(path):
    """Save what is local: refused where it differs, unless it is wrapped."""
    own = jnp.arange(4) + comm.rank
    state = {"w": own}
    for _ in range(comm.size):
        try:
            mpickpt.save_sharded(mpickpt.jax.adapt(state), path, step=1, comm=comm)
        except mpickpt.ReplicaMismatchError as error:
            say(f"refused {error.key}")
    wrapped = {"w": PerRank(own)}
    mpickpt.save_sharded(mpickpt.jax.adapt(wrapped), path, step=1, comm=comm)
    loaded = mpickpt.load_sharded(path, comm=comm, like=mpickpt.jax.adapt(wrapped))
    restored = mpickpt.jax.restore(loaded, wrapped)
    assert np.array_equal(restored["w"].data, own)
    gone = jnp.ones(3)
    if comm.rank == 1:
        gone.delete()
    try:
        mpickpt.save_sharded(
            mpickpt.jax.adapt({"gone": gone}), path, step=2, comm=comm, overwrite=True
        )
    except mpickpt.StateTypeError as error:
        say(f"refused {error}")
    spanning = {"w": PerRank(on(mesh_of("2x2"), np.zeros(8), "x"))}
    try:
        mpickpt.save_sharded(
            mpickpt.jax.adapt(spanning), path, step=2, comm=comm, overwrite=True
        )
    except mpickpt.StateTypeError as error:
        say(f"refused {error}")


def train(run, steps):
    """Go on up to so many steps; the state is donated to every one of them."""
    mesh = mesh_of("2x2")
    rng = np.random.default_rng(0)
    state = {
        "w": on(mesh, rng.standard_normal((64, 32)).astype(np.float32), "x", "y"),
        "mean": on(mesh, np.zeros((64, 32), np.float32), "x", "y"),
        "key": jax.random.wrap_key_data(on(mesh, np.zeros(2, np.uint32))),
        "count": on(mesh, np.zeros((), np.int32)),
    }

    def one_step(state):
        key, own = jax.random.split(state["key"])
        noise = jax.random.normal(own, state["w"].shape)
        mean = 0.9 * state["mean"] + 0.1 * jnp.sin(state["w"] + noise)
        w = state["w"] - 0.1 * mean / (1 + state["count"])
        return {"w": w, "mean": mean, "key": key, "count": state["count"] + 1}

    shardings = jax.tree.map(lambda array: array.sharding, state)
    step_once = jax.jit(one_step, donate_argnums=0, out_shardings=shardings)
    with CheckpointManager(
        run, comm, state=lambda: mpickpt.jax.adapt(state), when=mpickpt.EverySteps(1)
    ) as manager:
        if restored := manager.restore_latest(reshard=True):
            state = mpickpt.jax.restore(restored.state, state)
        first = manager.next_step
        for step in range(first, int(steps)):
            state = step_once(state)
            manager.save_if_due(step)
    digest = hashlib.sha256()
    own = {
        f"{name} {shard.index}": np.asarray(shard.data).tobytes()
        for name in ("w", "mean")
        for shard in state[name].addressable_shards
    }
    parts = {}
    for boxes in comm.allgather(own):
        parts.update(boxes)
    for index in sorted(parts):
        digest.update(parts[index])
    say(f"from {first} digest {digest.hexdigest()}")


def main():
    commands = {"save": save, "load": load, "local": local, "train": train}
    for words in sys.argv[1:]:
        command, *arguments = words.split(":")
        commands[command](*arguments)
    if comm.size > 1:
        jax.distributed.shutdown()


main()
