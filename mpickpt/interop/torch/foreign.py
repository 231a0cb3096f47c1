"""Lets the core save live objects whose state holds tensors: schedulers, loaders."""

from collections.abc import Callable
from typing import Any

from mpickpt.interop.torch.leaves import (
    bare,
    fill,
    marked,
    unmarked,
    wrapped_tensor,
)
from mpickpt.interop.torch.staging import Moves
from mpickpt.state import Sharded


class ForeignState:
    """An object with `state_dict` and `load_state_dict` whose state may hold tensors.

    Parameters
    ----------
    origin : object
        A scheduler, a scaler, a data loader.
    key : str
        Where it is in the tree, for messages.
    moves : callable, optional
        Makes the `Moves` of one save or load.

    Notes
    -----
    Tensors are given back on the CPU, as `torch.load(map_location="cpu")` does.
    """

    def __init__(
        self, origin: Any, key: str, moves: Callable[[], Moves] = Moves
    ) -> None:
        self.origin = origin
        self.key = key
        self.moves = moves

    def state_dict(self) -> Any:
        """Return the object's state with its tensors as arrays."""
        with self.moves() as moves:
            return marked(self.origin.state_dict(), self.key, moves)

    def load_state_dict(self, state: Any) -> None:
        """Give the object its state with tensors where they were."""
        self.origin.load_state_dict(unmarked(state))


class TensorState:
    """One tensor that numpy cannot see where it lies, as a live object.

    Parameters
    ----------
    tensor : torch.Tensor
        On a device, or a DTensor.
    name : str
        Where it is in the tree, for messages.
    moves : callable, optional
        Makes the `Moves` of one save or load.
    """

    def __init__(
        self, tensor: Any, name: str, moves: Callable[[], Moves] = Moves
    ) -> None:
        self.tensor = tensor
        self.name = name
        self.moves = moves

    def state_dict(self) -> Any:
        """Return the tensor as an array, or as this rank's boxes."""
        with self.moves() as moves:
            return wrapped_tensor(self.tensor, self.name, bare, moves.array_of)

    def state_dict_template(self) -> Any:
        """Return the memory to load into."""
        return wrapped_tensor(self.tensor, self.name, bare, self.moves().empty_like)

    def load_state_dict(self, leaf: Any) -> None:
        """Fill the tensor with what was loaded."""
        with self.moves() as moves:
            fill(self.tensor, leaf, self.name, moves)


class PiecesState:
    """`Sharded.pieces` of tensors on a device, as a live object.

    Parameters
    ----------
    sharded : Sharded
        With boxes whose data are tensors.
    name : str
        Where it is in the tree, for messages.
    moves : callable, optional
        Makes the `Moves` of one save or load.
    """

    def __init__(
        self, sharded: Sharded, name: str, moves: Callable[[], Moves] = Moves
    ) -> None:
        self.sharded = sharded
        self.name = name
        self.moves = moves

    def state_dict(self) -> Sharded:
        """Return the pieces as arrays."""
        with self.moves() as moves:
            return self._pieces(moves.array_of)

    def state_dict_template(self) -> Sharded:
        """Return the memory to load into."""
        return self._pieces(self.moves().empty_like)

    def load_state_dict(self, leaf: Sharded) -> None:
        """Fill the tensors with what was loaded."""
        loaded = leaf.boxes
        if loaded is None:
            loaded = ((leaf.offset or (), leaf.data),)
        arrays = dict(loaded)
        with self.moves() as moves:
            for offset, tensor in self.sharded.boxes or ():
                fill(tensor, arrays[offset], self.name, moves)

    def _pieces(self, array_of: Callable[..., Any]) -> Sharded:
        boxes = self.sharded.boxes or ()
        shape = self.sharded.global_shape or ()
        return Sharded.pieces(
            [(offset, array_of(tensor, self.name)) for offset, tensor in boxes],
            global_shape=shape,
            dtype=self.sharded.dtype,
        )
