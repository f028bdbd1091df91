"""How much of a candidate's error its routing alone explains: by itself, and with the golden's.

Three runs of one candidate are held against one golden at the end of every block and at the
logits: routed by itself, with the golden's choices, and with the golden's weights of them as well.
What the second lacks of the first's squared error is due to other experts, what the third lacks of
the second's to other weights of the same ones. What is left is arithmetic, and has met no router.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.anatomy.family import ROUTED
from layerparity.anatomy.site import PREFILL, Kind, Site
from layerparity.ground.errors import UserError
from layerparity.judge.rows import by_token, real_tokens
from layerparity.judge.sides import RunSet, SideRecord
from layerparity.numbers.at_the_end import at_the_end
from layerparity.numbers.metrics.sets import sets_agree

# Of the candidate's three runs: routed by itself, with the golden's choices, with its weights, too.
NATURAL, IDS, EVERYTHING = "natural", "ids replayed", "all replayed"


@dataclass(frozen=True)
class RoutingShare:
    """The errors at one site, by run: ||candidate - golden|| / ||golden|| over its real tokens.

    ``apart`` of ``tokens`` were routed apart in the block, by the run that routed by itself; None
    where a side did not record its choices, 0 where nothing is routed.
    ``kl`` is the mean divergence of the logits in nats, by run; empty elsewhere.
    """

    site: Site
    errors: dict[str, float]
    tokens: int
    apart: int | None
    kl: dict[str, float]

    @property
    def by_ids(self) -> float | None:
        """The part of the squared error that other experts explain; None where there is none."""
        return self._gone(NATURAL, IDS)

    @property
    def by_weights(self) -> float | None:
        """The part of the squared error that other weights of the same experts explain."""
        return self._gone(IDS, EVERYTHING)

    def _gone(self, before: str, after: str) -> float | None:
        whole = self.errors[NATURAL] ** 2
        return (self.errors[before] ** 2 - self.errors[after] ** 2) / whole if whole else None


def routing_shares(golden: RunSet, runs: dict[str, RunSet]) -> list[RoutingShare]:
    """Return the errors at the end of each block and at the logits of the prefill, in their order.

    ``runs`` are the candidate's, by `NATURAL`, `IDS` and `EVERYTHING`. A site counts that all of
    them hold. Raises UserError where a stored tensor is damaged, or holds NaN or Inf.
    """
    found = []
    for site, own in golden.records.items():
        end = site.is_logits or (site.layer is not None and site.local == ":out")
        if not end or site.phase != PREFILL or own.record.kind is not Kind.REAL:
            continue
        if any(_unlike(own, run.records.get(site)) for run in runs.values()):
            continue
        left, real = _rows(own)
        size, errors, kl = float(left.norm()), {}, {}
        for name, run in runs.items():
            right = _rows(run.records[site])[0]
            errors[name] = float((right - left).norm()) / size if size else 0.0
            if site.is_logits:
                kl[name] = at_the_end(left, right)["kl_mean"]
        found.append(RoutingShare(site, errors, len(left), _apart(site, golden, runs, real), kl))
    return sorted(found, key=lambda each: each.site.pass_order())


def _unlike(own: SideRecord, other: SideRecord | None) -> bool:
    return other is None or other.record.shape != own.record.shape


def _rows(own: SideRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a site's real tokens, float64 [token, element], and which those are."""
    view = by_token(own.source.load(own.record), own.record.axes)
    real = real_tokens(view, own.source.mask)
    rows = view[real].flatten(1).double()
    if not bool(rows.isfinite().all()):
        raise UserError(
            f"'{own.source.run.name}' has NaN or Inf at {own.record.site}: nothing is explained",
            "job=compare says where they begin.",
        )
    return rows, real


def _apart(site: Site, golden: RunSet, runs: dict[str, RunSet], real: torch.Tensor) -> int | None:
    """Return how many real tokens, bool [batch, token], chose other experts in a site's block."""
    experts = (each.layer_experts.get(site.layer or 0) for each in golden.manifests)
    if site.layer is None or not any(experts):
        return 0
    choices = site.beside(ROUTED)
    left, right = (side.records.get(choices) for side in (golden, runs[NATURAL]))
    if left is None or right is None or left.record.shape != right.record.shape:
        return None
    both = (by_token(each.source.load(each.record), each.record.axes) for each in (left, right))
    return int((~sets_agree(*both) & real).sum())
