"""Say how much of a candidate's error its routing explains: a table of blocks, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity.ground.numeral import numeral, percent
from layerparity.judge.routing_share import EVERYTHING, IDS, NATURAL, RoutingShare
from layerparity.report.study import Study

COLUMNS = ("at", "routed apart", NATURAL, IDS, EVERYTHING)


def study(shares: Sequence[RoutingShare], follows: str) -> Study:
    """Return what is kept and shown: the errors by block, and those of the last site."""
    by_block = [(each.site.layer, each) for each in shares if each.site.layer is not None]
    points = [
        (f"routing/{name}", error, layer)
        for layer, each in by_block
        for name, error in each.errors.items()
    ]
    last = shares[-1].errors
    points += [(f"routing/at the end, {name}", error, 0) for name, error in last.items()]
    lines = share_lines(shares)
    return Study(
        "||candidate - golden|| / ||golden||",
        COLUMNS,
        share_rows(shares),
        lines,
        points,
        texts={"routing.md": "\n".join([*lines, ""])},
        follows=follows,
    )


def share_rows(shares: Sequence[RoutingShare]) -> list[tuple[str, ...]]:
    """Return a line for each site: tokens routed apart there, and the error of each run."""
    return [
        (
            str(each.site),
            _apart(each),
            *(numeral(each.errors[name]) for name in (NATURAL, IDS, EVERYTHING)),
        )
        for each in shares
    ]


def share_lines(shares: Sequence[RoutingShare]) -> list[str]:
    """Return what routing explains of the squared error at the last site, and what is left."""
    last = shares[-1]
    ids, weights = last.by_ids, last.by_weights
    if ids is None or weights is None:
        return [f"at {last.site} nothing differs: there is nothing to explain"]
    explained = [
        f"at {last.site} routing alone explains {percent(ids + weights)} of the squared error: "
        f"{percent(ids)} other experts, {percent(weights)} other weights of the same experts"
    ]
    if all(share.apart == 0 for share in shares):
        # Runs with the same experts still round otherwise: that is no share of other experts.
        gone = percent(ids + weights) if ids + weights > 0 else "none"
        explained = [
            "no token was routed apart",
            f"at {last.site} the golden's weights of the experts take {gone} of the squared error "
            "away",
        ]
    lines = [
        *explained,
        f"what is left without it: {numeral(last.errors[EVERYTHING])} of the golden's norm",
    ]
    if last.kl:
        each = ", ".join(f"{name} {numeral(value)}" for name, value in last.kl.items())
        lines.append(f"mean KL divergence of the logits, nats: {each}")
    return lines


def _apart(share: RoutingShare) -> str:
    """Return how many tokens were routed apart at the end of a block, as far as that is known."""
    if share.site.layer is None:
        return ""
    return "-" if share.apart is None else f"{share.apart} of {share.tokens} tokens"
