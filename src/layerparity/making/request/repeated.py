"""Find the choices of a golden run that a candidate repeats (port.replay=true), or refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from layerparity.anatomy.family import ATTENDED, ROUTED, WEIGHED
from layerparity.anatomy.site import DECODE, Place, Site
from layerparity.ground.errors import UserError
from layerparity.ports.replay_keys import ALL, replays, shows_weights

if TYPE_CHECKING:
    from layerparity.making.request.inputs import Inputs, Request
    from layerparity.record.manifest import Manifest, Record
    from layerparity.settings.config import Config

TOKENS = Site("tokens", "out")


def refuse_unfed(config: Config, inputs: Inputs) -> None:
    """Raise UserError where a run is to repeat choices and no golden run feeds it."""
    if config.generate.forced and inputs.source != "golden":
        raise UserError(
            "generate.forced=true decodes a golden run's tokens, and this run is fed "
            f"{inputs.chosen}",
            "use inputs=golden.",
        )
    if not replays(config):
        return
    if config.kind.value == "golden":
        raise UserError("port.replay=true is for the run that is judged: add kind=candidate.")
    if inputs.source != "golden":
        raise UserError(
            f"port.replay=true repeats a golden run's choices, and this run is fed {inputs.chosen}:"
            " use inputs=golden."
        )


def refuse_unshown(site: Site, request: Request, what: str) -> None:
    """Raise UserError where no golden of the model could hold a site that is to be repeated."""
    model_type = str(request.model.get("model_type"))
    if site.local == WEIGHED and not shows_weights(model_type):
        raise UserError(f"No golden of {model_type} stores {what}: use port.replay=true.")


def choices(manifest: Manifest, request: Request) -> list[Record]:
    """Return what a run recorded of the choices that the scope's routers are to repeat.

    A golden that is fed a candidate's values repeats its choices as well. With
    ``generate.forced`` the tokens alone are repeated.
    The tokens it chose are among them: another token's routing would mean nothing.
    """
    asked = replays(request.config)
    routed = asked or request.config.inputs.name == "candidate"
    if not (routed or request.config.generate.forced):
        return []
    layers = {site.layer for site in _blocks(request)}
    kinds = [ROUTED, ATTENDED] if routed else []
    kinds += [WEIGHED] if asked == ALL else []
    wanted = {str(site) for site in _sites(request, layers, *kinds)}
    return [record for record in manifest.records if str(record.site) in wanted]


def lacking(manifests: Sequence[Manifest], request: Request) -> Site | None:
    """Return the first choice to repeat that no run recorded, or None."""
    asked = replays(request.config)
    if not asked:
        return None
    routed = {layer for manifest in manifests for layer in manifest.layer_experts}
    held = {str(record.site) for manifest in manifests for record in manifest.records}
    layers = {s.layer for s in _blocks(request) if s.component in ("", "mlp")} & routed
    kinds = (ROUTED, WEIGHED) if asked == ALL else (ROUTED,)
    return next((s for s in _sites(request, layers, *kinds) if str(s) not in held), None)


def _blocks(request: Request) -> list[Site]:
    found = (Site(stage, "in") for stage in request.stages)
    return [site for site in found if site.layer is not None]


def _sites(request: Request, layers: set[int | None], *choices: str) -> Iterator[Site]:
    """Yield these choices of some blocks, and the tokens, in every pass of a run."""
    ends = [local.partition(":") for local in choices]
    own = [Place(n, path).site(end) for path, _, end in ends for n in sorted(layers, key=str)]
    yield from own
    for step in range(request.config.generate.max_new_tokens):
        yield Site(TOKENS.path, TOKENS.end, DECODE, step)
        if step:
            yield from (Site(site.path, site.end, DECODE, step) for site in own)
