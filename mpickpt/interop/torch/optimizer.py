"""Saves an optimizer by the names of its parameters and fills it again, bit for bit.

`Optimizer.load_state_dict` is gone round: it numbers parameters, and casts moments to
the type of the parameter.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mpickpt.errors import LayoutError, StateTypeError
from mpickpt.interop.torch.dtensor import is_dtensor, whole_of
from mpickpt.interop.torch.fresh import FreshStates
from mpickpt.interop.torch.leaves import Wrap, fill, rebuilt, unwrapped, wrapped_tensor
from mpickpt.interop.torch.names import parameter_names
from mpickpt.interop.torch.staging import Moves
from mpickpt.interop.torch.tensors import is_tensor
from mpickpt.planning.live_rules import LiveRules
from mpickpt.state import Sharded

ArrayOf = Callable[[Any, str], Any]
States = dict[int, dict[str, Any]]


class OptimizerState:
    """An optimizer as a live object of a state tree.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Stepped or new: the state of a new one is made by the load.
    key : str
        Where it is in the tree, for messages.
    modules : mapping of str to Module
        The modules in the same tree, by their keys; they name the parameters. One
        that none of them has is named by group and index, as in "0.3".
    wrap : callable
        Gives the wrapper of tensors that are no DTensors.
    moves : callable, optional
        Makes the `Moves` of one save or load.

    Notes
    -----
    A load fills the memory of the optimizer's own tensors. What was saved for a
    parameter is taken as it was: none, if it had not been stepped.
    """

    live_rules = LiveRules(may_lack=True, loaded_only=True)

    def __init__(
        self,
        optimizer: Any,
        key: str,
        modules: Mapping[str, Any],
        wrap: Wrap,
        moves: Callable[[], Moves] = Moves,
    ) -> None:
        if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).mro()):
            raise StateTypeError(
                "a ZeroRedundancyOptimizer keeps whole parameters on single ranks and "
                "does not say where; use fully_shard, or save a flat partition of your "
                "own with Sharded.block"
            )
        self.optimizer = optimizer
        self.key = f"{key}/" if key else ""
        self.modules = dict(modules)
        self.wrap = wrap
        self.moves = moves
        self._fresh: States = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each parameter and the options of each group."""
        with self.moves() as moves:
            tree = self._tree(self._present(), moves.array_of)
        numbered: dict[str, Any] = _numbers(tree)
        return numbered

    def state_dict_template(self) -> dict[str, Any]:
        """Return the memory to load into; where there is no state yet, new memory."""
        fresh = FreshStates(self.optimizer)
        states = self._present()
        self._fresh = {}
        for group, _, parameter in _parameters(self.optimizer):
            if id(parameter) in states or not parameter.requires_grad:
                continue
            made = fresh.of(group, parameter)
            if made is None:
                _require_plain(self.optimizer, parameter)
            else:
                states[id(parameter)] = self._fresh[id(parameter)] = made
        numbered: dict[str, Any] = _numbers(self._tree(states, self.moves().empty_like))
        return numbered

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take what was loaded; most of it lies in the optimizer's memory already.

        Raises
        ------
        LayoutError
            Other parameters, groups or kinds of state than the optimizer has.
        """
        names = self._names()
        with self.moves() as moves:
            self._load_groups(tree.get("param_groups"), names, moves)
            if "state" in tree:
                self._load_states(tree["state"] or {}, names, moves)
        self._fresh = {}

    def _present(self) -> States:
        """Return the state that the optimizer has, by the identity of parameters."""
        own = {id(parameter) for _, _, parameter in _parameters(self.optimizer)}
        states = {}
        for parameter, state in self.optimizer.state.items():
            if id(parameter) not in own:
                raise StateTypeError(
                    f"a {type(self.optimizer).__name__} has state for something that "
                    "is none of its parameters; save that beside it"
                )
            if state:
                states[id(parameter)] = state
        return states

    def _tree(self, states: States, array_of: ArrayOf) -> dict[str, Any]:
        names = self._names()
        saved: dict[str, Any] = {}
        for _, _, parameter in _parameters(self.optimizer):
            name = names[id(parameter)]
            if id(parameter) in states:
                saved[name] = {
                    key: self._leaf(value, f"{self.key}state/{name}/{key}", array_of)
                    for key, value in states[id(parameter)].items()
                }
        groups = []
        for number, group in enumerate(self.optimizer.param_groups):
            options: dict[str, Any] = {
                key: self._leaf(
                    value, f"{self.key}param_groups/{number}/{key}", array_of
                )
                for key, value in group.items()
                if key != "params"
            }
            options["params"] = [names[id(parameter)] for parameter in group["params"]]
            groups.append(options)
        return {"state": saved, "param_groups": groups}

    def _leaf(self, value: Any, name: str, array_of: ArrayOf) -> Any:
        """Return a value as the core saves it; numbers as arrays without axes."""
        if is_tensor(value):
            if value.ndim == 0:
                return array_of(whole_of(value, name), name)
            return wrapped_tensor(value, name, self.wrap, array_of)
        if isinstance(value, dict):
            return {k: self._leaf(v, f"{name}/{k}", array_of) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._leaf(v, name, array_of) for v in value)
        return value

    def _names(self) -> dict[int, str]:
        """Return the name of each parameter, by its identity."""
        found: dict[int, tuple[str, str]] = {}
        for key, module in self.modules.items():
            for parameter, name in parameter_names(module).items():
                found.setdefault(parameter, (key, name))
        own = [id(parameter) for _, _, parameter in _parameters(self.optimizer)]
        several = len({found[one][0] for one in own if one in found}) > 1
        names = {}
        for group, index, parameter in _parameters(self.optimizer):
            key, name = found.get(id(parameter), ("", f"{group}.{index}"))
            names[id(parameter)] = f"{key}.{name}" if several and key else name
        if len(set(names.values())) != len(names):
            raise StateTypeError(
                f"two parameters of a {type(self.optimizer).__name__} have one name; "
                "give the modules that they belong to other names"
            )
        return names

    def _load_groups(self, saved: Any, names: dict[int, str], moves: Moves) -> None:
        if saved is None:
            return
        groups = self.optimizer.param_groups
        here = [[names[id(parameter)] for parameter in g["params"]] for g in groups]
        _require_same_groups([list(group.get("params", [])) for group in saved], here)
        for number, (group, options) in enumerate(zip(groups, saved, strict=True)):
            for key, value in options.items():
                if key != "params":
                    where = f"{self.key}param_groups/{number}/{key}"
                    group[key] = _taken(group.get(key), value, where, moves, "cpu")

    def _load_states(
        self, saved: dict[str, Any], names: dict[int, str], moves: Moves
    ) -> None:
        unknown = sorted(set(saved) - set(names.values()))
        if unknown:
            raise LayoutError(
                f"the checkpoint has optimizer state for {unknown[0]!r}, which is none "
                f"of the parameters of this {type(self.optimizer).__name__}",
                key=unknown[0],
            )
        for _, _, parameter in _parameters(self.optimizer):
            name = names[id(parameter)]
            if not saved.get(name):
                self.optimizer.state.pop(parameter, None)
                continue
            present = self.optimizer.state.get(parameter)
            present = present or self._fresh.get(id(parameter))
            self._require_same_kind(name, present, saved[name])
            self.optimizer.state[parameter] = {
                key: _taken(
                    (present or {}).get(key),
                    value,
                    f"{self.key}state/{name}/{key}",
                    moves,
                    parameter.device,
                )
                for key, value in saved[name].items()
            }

    def _require_same_kind(self, name: str, present: Any, saved: Any) -> None:
        """Raise unless the state has the tensors that this optimizer keeps."""
        if present is None or self._state_varies:
            return
        wanted, found = sorted(present), sorted(saved)
        if wanted != found:
            raise LayoutError(
                f"the saved state of {name!r} is {', '.join(found)}; this "
                f"{type(self.optimizer).__name__} keeps {', '.join(wanted)}: construct "
                "it as the one that was saved",
                key=name,
            )

    @property
    def _state_varies(self) -> bool:
        """Whether state comes and goes from step to step, as in LBFGS."""
        return any(c.__name__ == "LBFGS" for c in type(self.optimizer).mro())


def _parameters(optimizer: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield the number of the group, the number in it, and the parameter."""
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield number, index, parameter


def _numbers(tree: Any) -> Any:
    """Return a tree with numbers for arrays without axes.

    They are plain values then: the steps of ten thousand parameters need no datasets.
    """
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_numbers, tree))
    return tree[()] if isinstance(tree, np.ndarray) and tree.ndim == 0 else tree


def _taken(present: Any, saved: Any, name: str, moves: Moves, device: Any) -> Any:
    """Return a value of the optimizer with what was loaded in it."""
    if is_tensor(present):
        fill(present, saved, name, moves)
        return present
    if isinstance(saved, Sharded):
        raise LayoutError(
            f"{name!r} was saved in boxes, and this optimizer keeps nothing there: the "
            "parameter is frozen, or was never a DTensor; make it as it was saved",
            key=name,
        )
    value = unwrapped(saved)
    if isinstance(value, np.generic) and present is not None:
        return value.item()
    return rebuilt(saved, device)


def _require_plain(optimizer: Any, parameter: Any) -> None:
    if is_dtensor(parameter):
        raise StateTypeError(
            f"a {type(optimizer).__name__} that has not been stepped does not tell "
            "which state it will keep, so no boxes of it can be loaded; take one step "
            "with zero gradients before restoring"
        )


def _require_same_groups(saved: list[list[str]], here: list[list[str]]) -> None:
    """Raise unless the same parameters are in the same groups, in any order."""
    if len(saved) != len(here):
        raise LayoutError(
            f"the optimizer was saved with {len(saved)} parameter groups, the program "
            f"has {len(here)}; construct it with the same groups"
        )
    for number, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        if differing := sorted(set(theirs) ^ set(ours)):
            side = "the saved" if differing[0] in theirs else "the program's"
            raise LayoutError(
                f"{differing[0]!r} is in {side} parameter group {number} only; "
                "construct the optimizer with the same groups",
                key=differing[0],
            )
