"""Says how files of one rank each should be striped over Lustre; pure.

Sites that say anything of it ask their users to leave the layout as it is (Pawsey,
"Progressive File Layout (PFL) and File Striping": "we ask users not to manually adjust
the file striping"; Swinburne, "Filesystems"; NERSC, "Lustre", for files of one process
each up to 1 TB). So nothing is changed unless it is asked for.
"""

from dataclasses import dataclass

from mpickpt.planning.stripe_layout import ALL_OSTS, StripeComponent, StripeLayout
from mpickpt.planning.striping_wish import (
    PROGRESSIVE,
    ProgressiveStriping,
    Striping,
    Wish,
    difference,
    parse_striping,
)

__all__ = [
    "PROGRESSIVE",
    "RULES",
    "ProgressiveStriping",
    "StripeComponent",
    "StripeLayout",
    "Striping",
    "Wish",
    "complaint_about",
    "difference",
    "parse_striping",
    "plan_striping",
    "rule_for",
]

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40

# wiki.lustre.org, Pfl2-lfs-setstripe.1: the largest object on an ldiskfs OST.
OBJECT_NBYTES = 16 * TIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StripingRule:
    """What suits shards below some length.

    Attributes
    ----------
    below : int or None
        Bytes of the shard; None is any.
    least, most : int
        Over how many OSTs a shard goes. Between the two, as many as there are for
        each rank: more would have the ranks meet.
    size : int
        Bytes of a stripe.
    source : str
        Who says so.
    """

    below: int | None
    least: int = 1
    most: int
    size: int
    source: str


RULES = (
    StripingRule(
        below=GIB,
        most=1,
        size=4 * MIB,
        source="wiki.lustre.org, Lustre Striping Best Practices: up to 1 GiB one OST "
        "usually has enough bandwidth, more only if several clients use the file; "
        "4 MiB is the compiled default. wiki.lustre.org, PFL Prototype Scope "
        "Statement: for file-per-process a single stripe is optimal",
    ),
    StripingRule(
        below=10 * GIB,
        most=4,
        size=4 * MIB,
        source="wiki.lustre.org, Lustre Striping Best Practices: over 1 GiB from a "
        "single client 4 to 8 stripes. HPE, Configuration and Performance Trade-off "
        "for Striping: one where the clients are more than the OSTs, else enough to "
        "keep the OSTs busy. NERSC, Lustre: 1 for a file per process",
    ),
    StripingRule(
        below=TIB,
        most=8,
        size=16 * MIB,
        source="wiki.lustre.org, Lustre Striping Best Practices: over 1 GiB from a "
        "single client 4 to 8 stripes, with diminishing returns beyond",
    ),
    StripingRule(
        below=None,
        least=4,
        most=8,
        size=16 * MIB,
        source="NERSC, Lustre: files over 1 TB should be striped, also where there is "
        "one per process; Swinburne, Filesystems: so that they do not fill one OST",
    ),
)


def rule_for(shard_nbytes: int) -> StripingRule:
    """Return the rule for shards of so many bytes."""
    return next(
        rule for rule in RULES if rule.below is None or shard_nbytes < rule.below
    )


def plan_striping(shard_nbytes: int, n_ranks: int, n_osts: int | None) -> Striping:
    """Return the striping that suits one file per rank.

    Parameters
    ----------
    shard_nbytes : int
        Bytes of a shard.
    n_ranks : int
        Number of shards that are written at one time.
    n_osts : int or None
        Number of OSTs; None if that is not known.
    """
    rule = rule_for(shard_nbytes)
    share = (n_osts or 0) // max(1, n_ranks)
    holding = -(-shard_nbytes // OBJECT_NBYTES)
    count = max(rule.least, min(rule.most, share), holding)
    if n_osts:
        count = min(count, n_osts)
    osts = "an unknown number of" if n_osts is None else n_osts
    return Striping(
        count,
        rule.size,
        reason=f"{n_ranks} shards of {shard_nbytes / GIB:.3g} GiB on {osts} OSTs",
    )


def complaint_about(
    inherited: StripeLayout, *, shard_nbytes: int, n_ranks: int, n_osts: int | None
) -> str | None:
    """Return why a layout is bad for one file per rank, or None if it is not.

    Notes
    -----
    A layout is bad if it spreads every shard over all OSTs, or over more than twice as
    many as the rules would: then all ranks meet on each of them.
    """
    count = inherited.count_of(shard_nbytes)
    if count is None or n_ranks == 1 or n_osts == 1:
        return None
    if 0 <= count <= max(4, 2 * rule_for(shard_nbytes).most):
        return None
    over = "all OSTs" if count == ALL_OSTS else f"{count} OSTs"
    return (
        f"the layout ({inherited}) spreads each of {n_ranks} shards over {over}: all "
        "ranks meet on every one of these, and one that is slow or full stops them all"
    )
