"""JAX states in checkpoints: `adapt` names the arrays, `restore` gives new ones.

::

    state = {"params": params, "opt": opt_state, "step": 0}    # any pytree
    mpickpt.save_sharded(mpickpt.jax.adapt(state), path, step=7, comm=comm)

    loaded = mpickpt.load_sharded(path, comm=comm, like=mpickpt.jax.adapt(state))
    state = mpickpt.jax.restore(loaded, state)

The rest is the library's: a manager takes ``state=lambda: mpickpt.jax.adapt(state)``,
and ``reshard=True`` goes from one mesh to another. `like` may hold
`jax.ShapeDtypeStruct` with a sharding, so that nothing is allocated twice.
"""

try:
    from mpickpt.interop.jax.adapt import adapt, restore
except ImportError as error:
    raise ImportError(
        f"mpickpt.jax needs JAX ({error}): pip install 'mpickpt[jax]'"
    ) from error

__all__ = ["adapt", "restore"]
