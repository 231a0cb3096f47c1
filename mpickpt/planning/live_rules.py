"""How a live object takes part in a load, where it is not content with the usual."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRules:
    """What a live object says of its state dict; the defaults hold for any object.

    An object says it with an attribute ``live_rules``.

    Parameters
    ----------
    takes_unknown : bool
        It is given what was saved and its `state_dict()` does not have; else that
        is an unexpected entry, as it is in a dict.
    may_lack : bool
        Entries of its `state_dict()` need not have been saved.
    loaded_only : bool
        It is given what was loaded only: what the program keeps is left out of the
        dicts that its `load_state_dict` gets.
    """

    takes_unknown: bool = True
    may_lack: bool = False
    loaded_only: bool = False


USUAL = LiveRules()


def live_rules(value: Any) -> LiveRules:
    """Return the rules of a live object."""
    rules = getattr(value, "live_rules", USUAL)
    return rules if isinstance(rules, LiveRules) else USUAL
