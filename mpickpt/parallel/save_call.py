"""The arguments of one save."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt.parallel.options import SaveOptions
from mpickpt.storage.checkpoint_writer import WriteStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCall:
    """The arguments of one save."""

    tree: Any
    directory: Path
    step: int
    metadata: dict[str, Any] | None
    metrics: dict[str, Any] | None
    overwrite: bool
    options: SaveOptions

    def check(self) -> None:
        """Raise unless the arguments are of the right kind."""
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise TypeError(f"step is a {type(self.step).__name__}; expected an int")
        if not 0 <= self.step < 2**63:
            raise ValueError(f"step is {self.step}; expected 0 or more")
        for name in ("metadata", "metrics"):
            _require_json(name, getattr(self, name))

    @property
    def style(self) -> WriteStyle:
        """How the shards are written."""
        return WriteStyle(
            block_nbytes=self.options.block_nbytes,
            direct_io=self.options.direct_io or "auto",
            read_back=self.options.read_back,
        )


def _require_json(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a dict or None")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} cannot be written as JSON: {error}") from error
