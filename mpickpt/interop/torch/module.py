"""Saves a module and fills it again: parameters, buffers, ties, extra state."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpickpt.errors import LayoutError
from mpickpt.interop.ties import tie, tied_to
from mpickpt.interop.torch.leaves import (
    Wrap,
    fill,
    marked,
    unmarked,
    wrapped_tensor,
)
from mpickpt.interop.torch.names import entries_of, own_tensors, ties_of
from mpickpt.interop.torch.staging import Moves
from mpickpt.interop.torch.tensors import is_tensor
from mpickpt.planning.live_rules import LiveRules
from mpickpt.state import AsSaved


class ModuleState:
    """A module as a live object of a state tree.

    Parameters
    ----------
    module : torch.nn.Module
        With or without DistributedDataParallel, fully_shard, torch.compile.
    key : str
        Where it is in the tree, for messages.
    wrap, wrap_buffer : callable
        Give the wrapper of parameters and of buffers that are no DTensors.
    moves : callable, optional
        Makes the `Moves` of one save or load.

    Notes
    -----
    A load fills the memory of the module's own tensors. Entries that only one side
    has are errors, as they are in a dict.
    """

    live_rules = LiveRules(takes_unknown=False, loaded_only=True)

    def __init__(
        self,
        module: Any,
        key: str,
        wrap: Wrap,
        wrap_buffer: Wrap,
        moves: Callable[[], Moves] = Moves,
    ) -> None:
        self.module = module
        self.key = key
        self.wrap = wrap
        self.wrap_buffer = wrap_buffer
        self.moves = moves

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by name, each where it lies."""
        with self.moves() as moves:
            return self._tree(
                moves.array_of,
                lambda value, name: marked(value, name, moves, self.wrap),
            )

    def state_dict_template(self) -> dict[str, Any]:
        """Return the memory to load into, and `AsSaved` for extra state."""
        return self._tree(self.moves().empty_like, lambda value, name: AsSaved)

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take what was loaded; most of it lies in the module's memory already.

        Raises
        ------
        LayoutError
            Other shapes, boxes or ties than the module has.
        """
        with self.moves() as moves:
            foreign = dict(self._filled(tree, moves))
        if foreign:
            # Its owner knows what to do with it: set_extra_state, or a hook.
            self.module.load_state_dict(foreign, strict=False)

    def _filled(self, tree: dict[str, Any], moves: Moves) -> Iterator[tuple[str, Any]]:
        """Fill the module's own tensors; yield what is not its own, by raw name."""
        entries = entries_of(self.module)
        ties, own = ties_of(entries), own_tensors(self.module)
        for name, raw, value in entries:
            if name not in tree:
                continue  # the load was told to keep it
            saved, where = tree[name], self._where(name)
            _require_same_tie(where, ties.get(name), tied_to(saved))
            if id(value) not in own:
                yield raw, _foreign_value(value, saved, where, moves)
            elif name not in ties:
                fill(value, saved, where, moves)

    def _tree(
        self, array_of: Callable[..., Any], extra: Callable[[Any, str], Any]
    ) -> dict[str, Any]:
        entries = entries_of(self.module)
        ties = ties_of(entries)
        tree: dict[str, Any] = {}
        for name, _, value in entries:
            if name in ties:
                tree[name] = tie(ties[name])
            elif is_tensor(value):
                wrap = self._wrap_of(value)
                tree[name] = wrapped_tensor(value, self._where(name), wrap, array_of)
            else:
                tree[name] = extra(value, self._where(name))
        return tree

    def _where(self, name: str) -> str:
        """Return where a tensor is in the whole tree, for messages."""
        return f"{self.key}/{name}" if self.key else name

    def _wrap_of(self, tensor: Any) -> Wrap:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return self.wrap if is_parameter else self.wrap_buffer


def _foreign_value(value: Any, saved: Any, name: str, moves: Moves) -> Any:
    """Return what a module's own hooks put into its state dict, as it was saved."""
    if not is_tensor(value):
        return unmarked(saved)
    fill(value, saved, name, moves)
    return value


def _require_same_tie(name: str, here: str | None, saved: str | None) -> None:
    if here == saved:
        return
    told = [
        f"tied to {owner!r}" if owner else "a parameter of its own"
        for owner in (saved, here)
    ]
    raise LayoutError(
        f"{name!r} was saved as {told[0]}, in the program it is {told[1]}; tie the "
        "same parameters before loading",
        key=name,
    )
