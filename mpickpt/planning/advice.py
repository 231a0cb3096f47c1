"""Says what follows from the findings of `mpickpt doctor`; pure.

A rule looks at the findings and yields its advice, or nothing. What a rule needs that
could not be found out, it passes over: that it is unknown is in the report.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from mpickpt.planning.advice_on_files import FILE_RULES
from mpickpt.planning.advice_on_mounts import MOUNT_RULES
from mpickpt.planning.advice_on_ranks import RANK_RULES
from mpickpt.planning.findings import Advice, Findings

Rule: TypeAlias = Callable[[Findings], Iterator[Advice]]

RULES: Sequence[Rule] = (*RANK_RULES, *MOUNT_RULES, *FILE_RULES)


def advise(findings: Findings) -> tuple[Advice, ...]:
    """Return what to do, what would cost checkpoints first; nothing if all is well."""
    said = [advice for rule in RULES for advice in rule(findings)]
    return tuple(sorted(said, key=lambda advice: not advice.is_grave))
