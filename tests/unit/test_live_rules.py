"""What a live object may say of its state dict: what it takes, lacks, and is given."""

import numpy as np
import pytest

from mpickpt import LayoutError, PerRank, Replicated, load_sharded, save_sharded
from mpickpt.planning.live_rules import LiveRules


class Holder:
    """Keeps what it is given; its state is a dict of arrays and values."""

    def __init__(self, state, **rules):
        self.state = state
        self.given = None
        self.live_rules = LiveRules(**rules)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.given = state


def saved(tmp_path, **entries):
    state = {key: Replicated(np.full(2, value)) for key, value in entries.items()}
    save_sharded({"it": Holder(state), "n": 1}, tmp_path / "c", step=0)
    return tmp_path / "c"


def wanting(*keys, **rules):
    return Holder({key: Replicated(np.zeros(2)) for key in keys}, **rules)


def test_object_takes_what_it_does_not_know_by_default(tmp_path):
    path = saved(tmp_path, a=1.0, b=2.0)
    holder = wanting("a")

    load_sharded(path, like={"it": holder, "n": 0})

    assert sorted(holder.given) == ["a", "b"]


def test_object_may_take_its_own_entries_only(tmp_path):
    path = saved(tmp_path, a=1.0, b=2.0)
    holder = wanting("a", takes_unknown=False)

    with pytest.raises(LayoutError, match="'it/b': in the checkpoint, but not"):
        load_sharded(path, like={"it": holder, "n": 0})

    load_sharded(path, like={"it": holder, "n": 0}, unexpected="ignore")
    assert sorted(holder.given) == ["a"]


def test_object_is_given_what_it_keeps_unless_it_asks_for_less(tmp_path):
    path = saved(tmp_path, a=1.0)
    usual, less = wanting("a", "b"), wanting("a", "b", loaded_only=True)

    for holder in (usual, less):
        load_sharded(path, like={"it": holder, "n": 0}, missing="keep")

    assert sorted(usual.given) == ["a", "b"]
    assert sorted(less.given) == ["a"]


def test_entries_may_be_missing_only_where_the_object_says_so(tmp_path):
    path = saved(tmp_path, a=1.0)
    strict = wanting("a", "b", loaded_only=True)
    sparse = wanting("a", "b", loaded_only=True, may_lack=True)

    with pytest.raises(LayoutError, match="'it/b': in `like`, but not"):
        load_sharded(path, like={"it": strict, "n": 0})
    load_sharded(path, like={"it": sparse, "n": 0})

    assert sorted(sparse.given) == ["a"]


def test_object_is_not_touched_where_nothing_of_it_is_loaded(tmp_path):
    path = saved(tmp_path, a=1.0)
    holder = wanting("a", loaded_only=True)

    load_sharded(path, like={"it": holder, "n": 0}, only=["n"])

    assert holder.given is None


def test_entry_that_is_not_selected_is_left_out(tmp_path):
    path = saved(tmp_path, a=1.0, b=2.0)
    holder = wanting("a", "b", loaded_only=True)

    load_sharded(path, like={"it": holder, "n": 0}, only=["it/a"])

    assert sorted(holder.given) == ["a"]


def test_rules_hold_for_wrapped_entries_too(tmp_path):
    path = saved(tmp_path, a=1.0)
    state = {"a": Replicated(np.zeros(2)), "b": PerRank(np.zeros(2), on_resize="keep")}
    holder = Holder(state, loaded_only=True, may_lack=True)

    load_sharded(path, like={"it": holder, "n": 0})

    assert list(holder.given) == ["a"]


def test_error_of_ours_is_raised_as_it_is(tmp_path):
    path = saved(tmp_path, a=1.0)
    holder = wanting("a")

    def refuse(state):
        raise LayoutError("not mine", key="a")

    holder.load_state_dict = refuse

    with pytest.raises(LayoutError, match="not mine") as caught:
        load_sharded(path, like={"it": holder, "n": 0})
    assert caught.value.key == "a"


def test_attribute_of_that_name_that_means_something_else_is_passed_over(tmp_path):
    path = saved(tmp_path, a=1.0, b=2.0)
    holder = wanting("a")
    holder.live_rules = "mine"

    load_sharded(path, like={"it": holder, "n": 0})

    assert sorted(holder.given) == ["a", "b"]
