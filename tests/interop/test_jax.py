"""States of JAX in one process with eight devices: saved, restored, refused."""

import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import mpickpt
from mpickpt import CheckpointManager, PerRank, Replicated, StateTypeError

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import mpickpt.jax  # noqa: E402


class Moments(NamedTuple):
    count: object
    mean: object


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "moments"],
    meta_fields=["activation"],
)
@dataclass
class Layer:
    weight: object
    moments: object
    activation: object = jax.nn.relu


def mesh(*shape):
    names = ("x", "y", "z")[: len(shape)]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def on(array, *spec, shape=(4, 2)):
    return jax.device_put(array, NamedSharding(mesh(*shape), P(*spec)))


def bits(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if not isinstance(a, jax.Array):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
        assert a.sharding == b.sharding
        assert a.committed == b.committed
        assert bits(a) == bits(b)


def state_of(factor=1):
    weight = on(jnp.arange(32.0).reshape(8, 4) * factor, "x", "y")
    mean = on(jnp.arange(8, dtype=jnp.bfloat16) * factor, ("x", "y"))
    return {
        "layers": [Layer(weight, Moments(jnp.int32(3 * factor), mean)), None],
        "pair": (on(jnp.float32(0.5 * factor)), on(jnp.zeros((0, 4)), "x")),
        "ordered": OrderedDict(b=on(jnp.ones(3) * factor), a=jnp.bool_(factor == 1)),
        "low": on((jnp.arange(16) * factor).astype(jnp.float8_e4m3fn), "x"),
        "rate": jnp.asarray(0.25 * factor),  # weakly typed
        "key": jax.random.key(factor),
        "keys": on(jax.random.split(jax.random.key(factor), 8), "x"),
        "own": PerRank({"key": jax.random.key(7 * factor)}, on_resize="keep"),
        "step": 12 * factor,
    }


def round_trip(path, state, like, **options):
    mpickpt.save_sharded(mpickpt.jax.adapt(state), path, step=1)
    return load(path, like, **options)


def load(path, like, **options):
    loaded = mpickpt.load_sharded(path, like=mpickpt.jax.adapt(like), **options)
    return mpickpt.jax.restore(loaded, like)


def test_restore_gives_the_state_that_was_saved(tmp_path):
    state, like = state_of(), state_of(factor=2)

    restored = round_trip(tmp_path / "c", state, like)

    own, saved_own = restored.pop("own"), state.pop("own")
    assert_same(restored, state)
    assert own.on_resize == "keep"
    assert_same(own.data, saved_own.data)


def test_restore_changes_nothing_of_its_template(tmp_path):
    like, same = state_of(factor=2), state_of(factor=2)

    round_trip(tmp_path / "c", state_of(), like)

    assert like.pop("own").data["key"] == same.pop("own").data["key"]
    assert_same(like, same)


def test_checkpoint_holds_plain_arrays_under_the_paths_of_the_tree(tmp_path):
    mpickpt.save_sharded(mpickpt.jax.adapt(state_of()), tmp_path / "c", step=1)

    with mpickpt.open_checkpoint(tmp_path / "c") as checkpoint:
        keys = set(checkpoint.keys())
        weight = checkpoint["layers/0/weight"][...]

    assert {"layers/0/moments/mean", "ordered/b", "key/key_data"} <= keys
    assert not any("activation" in key for key in keys)
    np.testing.assert_array_equal(weight, np.arange(32.0).reshape(8, 4))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((8,), ("x",)), ((2, 4), ("y", "x")), ((2, 2, 2), (("z", "x"), "y")), ((1,), ())],
)
def test_restore_puts_arrays_on_another_mesh(tmp_path, shape, spec):
    state = {
        "w": on(jnp.arange(64.0).reshape(8, 8), "x", "y"),
        "keys": on(jax.random.split(jax.random.key(0), 8), ("y", "x")),
    }
    like = {
        "w": on(jnp.zeros((8, 8)), *spec, shape=shape),
        "keys": on(jax.random.split(jax.random.key(1), 8), *spec[:1], shape=shape),
    }

    restored = round_trip(tmp_path / "c", state, like, reshard=True)

    for name in state:
        assert restored[name].sharding == like[name].sharding
        assert bits(restored[name]) == bits(state[name])


def test_restore_makes_arrays_of_described_ones(tmp_path):
    state = {
        "w": on(jnp.arange(8.0), "x"),
        "k": on(jax.random.key(3)),
        "n": jnp.ones(2),
    }
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=a.sharding if a.committed else None
        ),
        state,
    )

    restored = round_trip(tmp_path / "c", state, like)

    assert_same(restored, state)


def test_counter_that_was_bound_to_no_device_works_with_a_mesh_after_restore(tmp_path):
    state = {"w": on(jnp.arange(8.0), "x"), "count": jnp.zeros((), jnp.int32)}
    step = jax.jit(lambda s: {"w": s["w"] * 2, "count": s["count"] + 1})
    step(state)

    restored = step(round_trip(tmp_path / "c", state, state))

    assert int(restored["count"]) == 1


def test_restored_arrays_can_be_donated_and_share_no_memory(tmp_path):
    state = {"a": on(jnp.arange(8192.0)), "b": on(jnp.arange(8192.0), "x")}
    restored = round_trip(tmp_path / "c", state, state)
    again = load(tmp_path / "c", state)

    twice = jax.jit(lambda s: jax.tree.map(lambda a: a * 2, s), donate_argnums=0)
    doubled = twice(restored)

    assert_same(again, state)
    np.testing.assert_array_equal(doubled["a"], 2 * np.arange(8192.0))


def test_manager_restores_immutable_arrays(tmp_path):
    def train(steps):
        state = {"w": on(jnp.zeros(8), "x"), "opt": Moments(jnp.int32(0), jnp.ones(3))}

        def adapted():
            return mpickpt.jax.adapt(state)

        with CheckpointManager(tmp_path / "run", state=adapted) as manager:
            if restored := manager.restore_latest():
                state = mpickpt.jax.restore(restored.state, state)
            first = manager.next_step
            for step in range(first, steps):
                state = jax.tree.map(lambda a: a + 1, state)
                manager.save(step)
        return first, state

    train(3)
    first, state = train(5)

    assert first == 3
    assert_same(
        state,
        {
            "w": on(jnp.full(8, 5.0, jnp.float32), "x"),
            "opt": Moments(jnp.int32(5), 5 + jnp.ones(3)),
        },
    )


def test_asynchronous_save_holds_what_was_there_when_it_began(tmp_path):
    state = {"w": on(jnp.arange(4096.0), "x")}
    step = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s), donate_argnums=0)

    pending = mpickpt.save_sharded_async(
        mpickpt.jax.adapt(state), tmp_path / "c", step=1
    )
    after = step(state)
    pending.result()

    restored = load(tmp_path / "c", after)
    np.testing.assert_array_equal(restored["w"], np.arange(4096.0))


def test_save_from_devices_asks_for_all_copies_at_once(tmp_path, monkeypatch):
    state = {"w": on(jnp.arange(8.0), "x"), "key": jax.random.key(0), "d": jnp.ones(1)}
    adapted = mpickpt.jax.adapt(state)
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: asked.append(1) or "gpu")

    mpickpt.save_sharded(adapted, tmp_path / "c", step=1)

    assert_same(load(tmp_path / "c", state), state)
    assert asked


def test_partial_load_keeps_the_other_arrays(tmp_path):
    state = {"w": on(jnp.arange(8.0), "x"), "b": jnp.ones(2)}
    like = {"w": on(jnp.zeros(8), "x"), "b": jnp.full(2, 7.0), "new": jnp.full(2, 9.0)}

    restored = round_trip(tmp_path / "c", state, like, only=["w"], missing="keep")

    assert_same(restored, like | {"w": state["w"]})


def test_saved_entries_that_are_not_wanted_are_left_out_when_ignored(tmp_path):
    state = {"opt": Moments(jnp.int32(1), jnp.ones(3)), "w": jnp.ones(2)}
    mpickpt.save_sharded(mpickpt.jax.adapt(state), tmp_path / "c", step=1)

    with pytest.raises(mpickpt.LayoutError, match="opt/mean"):
        load(tmp_path / "c", {"w": jnp.zeros(2)})
    restored = load(tmp_path / "c", {"w": jnp.zeros(2)}, unexpected="ignore")

    assert_same(restored, {"w": jnp.ones(2)})


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [((3,), "float32", "global shape"), ((2,), "bfloat16", "bfloat16")],
)
def test_load_into_an_array_of_another_form_is_refused(tmp_path, shape, dtype, reason):
    like = {"w": jnp.zeros(shape, dtype)}

    with pytest.raises(mpickpt.LayoutError, match=reason):
        round_trip(tmp_path / "c", {"w": jnp.ones(2)}, like)


def test_load_into_another_tree_is_refused(tmp_path):
    like = {"w": {"a": jnp.zeros(2)}}

    with pytest.raises(mpickpt.LayoutError, match="make the template the same"):
        round_trip(tmp_path / "c", {"w": jnp.ones(2)}, like)


def test_keys_of_another_generator_are_refused(tmp_path):
    state = {"key": jax.random.key(0, impl="rbg")}
    like = {"key": jax.random.key(0, impl="unsafe_rbg")}

    with pytest.raises(StateTypeError, match="'key': saved were keys for 'rbg'"):
        round_trip(tmp_path / "c", state, like)


def test_keys_are_not_made_of_an_array(tmp_path):
    with pytest.raises(StateTypeError, match="'w': saved were no typed keys"):
        round_trip(tmp_path / "c", {"w": jnp.ones(2)}, {"w": jax.random.key(0)})


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_array_of_less_than_a_byte_an_element_is_refused(tmp_path, dtype):
    state = {"w": {"low": jnp.zeros(4, dtype)}}

    with pytest.raises(StateTypeError, match=f"'w/low': .*{dtype}"):
        mpickpt.save_sharded(mpickpt.jax.adapt(state), tmp_path / "c", step=1)


def test_deleted_array_is_refused(tmp_path):
    state = {"a": jnp.ones(2), "w": jnp.ones(2)}
    state["w"].delete()

    with pytest.raises(StateTypeError, match="'w': was deleted or donated"):
        mpickpt.save_sharded(mpickpt.jax.adapt(state), tmp_path / "c", step=1)


def test_described_array_is_refused_in_a_save(tmp_path):
    state = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}

    with pytest.raises(StateTypeError, match=r"'w': is a jax\.ShapeDtypeStruct"):
        mpickpt.save_sharded(mpickpt.jax.adapt(state), tmp_path / "c", step=1)


def test_tracer_is_refused(tmp_path):
    @jax.jit
    def step(w):
        mpickpt.save_sharded(mpickpt.jax.adapt({"w": w}), tmp_path / "c", step=1)
        return w

    with pytest.raises(StateTypeError, match=r"'w': .* is a tracer"):
        step(jnp.ones(2))


def test_described_array_that_was_not_loaded_is_refused(tmp_path):
    like = {"w": jnp.ones(2), "b": jax.ShapeDtypeStruct((2,), jnp.float32)}

    with pytest.raises(StateTypeError, match="'b' was not loaded"):
        round_trip(tmp_path / "c", {"w": jnp.ones(2)}, like, missing="keep")


def test_restore_of_what_was_loaded_otherwise_is_refused(tmp_path):
    state = {"a": Moments(jnp.int32(1), jnp.ones(2))}
    mpickpt.save_sharded(mpickpt.jax.adapt(state), tmp_path / "c", step=1)

    with pytest.raises(StateTypeError, match="'a/count' is an array of JAX in `like`"):
        mpickpt.jax.restore(mpickpt.load_sharded(tmp_path / "c"), state)


def test_wrapped_arrays_keep_their_wrappers(tmp_path):
    state = {
        "block": mpickpt.Sharded.block(jnp.arange(4.0)),
        "own": PerRank(jnp.arange(3)),
        "same": Replicated({"a": jnp.ones(2), "n": 3}, check="full"),
        "host": Replicated(np.arange(2)),
    }
    like = {
        "block": mpickpt.Sharded.block(jnp.zeros(4)),
        "own": PerRank(jnp.zeros(3, jnp.int32)),
        "same": Replicated({"a": jnp.zeros(2), "n": 0}, check="full"),
        "host": Replicated(np.zeros(2, int)),
    }

    restored = round_trip(tmp_path / "c", state, like)

    assert isinstance(restored["block"], mpickpt.Sharded)
    assert restored["same"].check == "full"
    assert restored["same"].data["n"] == 3
    np.testing.assert_array_equal(restored["host"].data, [0, 1])
    for name in ("block", "own"):
        assert_same(restored[name].data, state[name].data)
    assert_same(restored["same"].data["a"], jnp.ones(2))


def test_number_that_a_step_made_an_array_is_restored_as_a_number(tmp_path):
    fresh = Moments(0, jnp.zeros(2))
    stepped = jax.jit(lambda m: Moments(m.count + 1, m.mean + 1))(fresh)

    restored = round_trip(tmp_path / "c", {"m": stepped}, {"m": fresh})
    again = round_trip(tmp_path / "d", restored, {"m": fresh})

    assert_same(restored, {"m": Moments(1, jnp.ones(2))})
    assert_same(again, restored)


def test_number_is_not_made_of_an_array_of_several(tmp_path):
    with pytest.raises(StateTypeError, match="'count': the program has the number 0"):
        round_trip(
            tmp_path / "c",
            Moments(jnp.arange(2), jnp.ones(2)),
            Moments(0, jnp.zeros(2)),
        )


def test_plain_values_that_grew_are_restored(tmp_path):
    state = {"losses": [1.0, 2.0], "seen": {"a": 1}, "w": jnp.ones(1)}

    restored = round_trip(
        tmp_path / "c", state, {"losses": [], "seen": {}, "w": jnp.ones(1)}
    )

    assert_same(restored, state)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )


def test_missing_jax_is_told_with_what_to_install():
    ended = run_python("import sys; sys.modules['jax'] = None; import mpickpt.jax")

    assert ended.returncode
    assert "pip install 'mpickpt[jax]'" in ended.stderr


def test_library_itself_does_not_import_jax():
    names = ("save_sharded", "load_sharded", "CheckpointManager")
    uses = "; ".join(f"mpickpt.{name}" for name in names)

    ended = run_python(f"import sys, mpickpt; {uses}; assert 'jax' not in sys.modules")

    assert ended.returncode == 0, ended.stderr
