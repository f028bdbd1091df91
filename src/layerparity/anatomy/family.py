"""Family: what the framework knows of one architecture, and the layout most of them share.

A family's file is named after the checkpoint's ``model_type`` and holds ``FAMILY``. An unknown
model type gets the shared layout, in which nothing is taken for granted of what a component is fed;
what a block lacks is skipped and said so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.block import Block
from layerparity.anatomy.embedding import Embedding
from layerparity.anatomy.site import EMBEDDING, HEAD, NORM, Kind, Place, Site, SiteSpec, within
from layerparity.ground import registry
from layerparity.ground.errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

# What a model computes after a stage's module, of its output ([batch, token, channel], or logits
# [batch, token, vocabulary], in the run's dtype) and transformers' configuration.
After = Callable[["torch.Tensor", Any], "torch.Tensor"]
# What a config.json says, by its keys.
Values = Mapping[str, Any]

HIDDEN = SiteSpec(("batch", "token", "channel"))
HEADS = SiteSpec(("batch", "token", "head", "channel"))
EXPERTS = SiteSpec(("batch", "token", "expert"))
CHOICES = SiteSpec(("batch", "token", "expert"), Kind.INDEX_SET)
# Which tokens attention chose for each token to look at, where it does not look at all.
CHOSEN_TOKENS = SiteSpec(("batch", "token", "key"), Kind.INDEX_SET)
TOKENS = SiteSpec(("batch", "token"), Kind.EXACT)
LOGITS = SiteSpec(("batch", "token", "vocabulary"))
# Where every block's router shows which experts it chose.
ROUTED = "mlp.gate:choices"
# How much each of them counts, and in what order: as the choices stand.
WEIGHED = "mlp.gate:weights"
# Where attention shows which tokens it chose to look at.
ATTENDED = "self_attn.indexer:choices"


@dataclass(frozen=True)
class Derived:
    """A tensor that is no element of what a module puts out.

    ``read(module, output)`` returns it; ``write(module, output, value)`` returns an output that
    says another value. Without ``write``, nothing goes on in its place.
    """

    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], Any] | None = None


@dataclass(frozen=True)
class Tap:
    """Where a site is observed in a block: a module's input or output, or the attention interface.

    ``module`` is the path inside the block; ``pick`` the element of a tuple, or which argument an
    input is, where it has no name (``argument``); ``attention`` the name of an argument at the
    attention interface (``query``, ``key`` or ``context``). ``heads_first`` says that the module
    works on [batch, head, token, channel]. ``follows`` are the taps of the same call of a module
    that this one is computed from. A ``branch`` is what a block adds to its residual stream, under
    a name of the family's own: it is wanted wherever ``mlp:out`` is. ``derived`` stands where the
    tensor is no element of the output.
    """

    local: str
    module: str
    spec: SiteSpec = HIDDEN
    pick: int | None = None
    of_input: bool = False
    argument: str = ""
    attention: str | None = None
    heads_first: bool = False
    follows: tuple[str, ...] = ()
    branch: bool = False
    derived: Derived | None = None

    @property
    def is_of_module(self) -> bool:
        """Whether it is what a module is fed or puts out, and nothing that is read out of it."""
        return self.attention is None and self.derived is None and not self.follows

    @property
    def chooses_tokens(self) -> bool:
        """Whether its module chooses tokens itself, where others are given what another chose."""
        return self.spec is CHOSEN_TOKENS and not self.of_input


# What blocks share that norm first and add afterwards, in the order of a forward pass.
TAPS = (
    Tap("input_layernorm:out", "input_layernorm"),
    Tap("self_attn.q_proj:out", "self_attn.q_proj"),
    Tap("self_attn.k_proj:out", "self_attn.k_proj"),
    Tap("self_attn.v_proj:out", "self_attn.v_proj"),
    Tap("self_attn.q_norm:out", "self_attn.q_norm"),
    Tap("self_attn.k_norm:out", "self_attn.k_norm"),
    Tap("self_attn:q_rotated", "self_attn", HEADS, attention="query"),
    Tap("self_attn:k_rotated", "self_attn", HEADS, attention="key"),
    Tap("self_attn:context", "self_attn", HEADS, attention="context"),
    Tap("self_attn:out", "self_attn", pick=0),
    Tap("post_attention_layernorm:in", "post_attention_layernorm", of_input=True),
    Tap("post_attention_layernorm:out", "post_attention_layernorm"),
    Tap("mlp.gate:logits", "mlp.gate", EXPERTS, pick=0),
    Tap(ROUTED, "mlp.gate", CHOICES, pick=2, follows=("mlp.gate:logits",)),
    Tap(WEIGHED, "mlp.gate", EXPERTS, pick=1, follows=("mlp.gate:logits", ROUTED)),
    Tap("mlp.experts:out", "mlp.experts"),
    Tap("mlp:out", "mlp"),
)

# Where a block norms elsewhere, or twice, a component's input is the output of no other.
SHARED_TAPS = (
    *TAPS,
    Tap("self_attn:in", "self_attn", of_input=True),
    Tap("mlp:in", "mlp", of_input=True),
)


def taps_under(names: Mapping[str, str]) -> tuple[Tap, ...]:
    """Return the shared taps of blocks whose modules have ``names`` of their own, by the usual."""
    return tuple(replace(tap, module=names.get(tap.module, tap.module)) for tap in SHARED_TAPS)


# What a user may call a component, and the module it is.
COMPONENTS = {
    "attention": "self_attn",
    "self_attn": "self_attn",
    "moe": "mlp",
    "mlp": "mlp",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}
OUTSIDE = {
    "embedding": EMBEDDING,
    "embed_tokens": EMBEDDING,
    "norm": NORM,
    "head": HEAD,
    "lm_head": HEAD,
}


@dataclass(frozen=True)
class Family:
    """One architecture: where its sites are and which small tensors must stay float32.

    The taps of a ``complete`` family name all its sites; to others, those that are measured are
    added. ``block`` says what is computed from what in its blocks, for runs that hold no
    measurement. ``after`` is what the model computes between a stage's module and the next stage.
    ``attention`` is the implementation to run with where the backend's usual one does not exist.
    ``embedding`` names the modules of its embedding, where that is more than one table of tokens.
    ``handers(values, layer)`` returns the stages that hand on what a block takes beside its state,
    by the values of config.json: a run that lacks them is refused, so they need not be all.
    """

    model_type: str
    taps: tuple[Tap, ...] = SHARED_TAPS
    block: Block | None = None
    complete: bool = False
    float32_patterns: tuple[str, ...] = ()
    after: Mapping[str, After] = field(default_factory=dict)
    attention: str | None = None
    embedding: Embedding | None = None
    handers: Callable[[Values, int], Sequence[str]] | None = None

    def stage(self, component: str, layer: int | None) -> str:
        """Return the stage of a component the user named. Raises UserError with the known names."""
        if component in OUTSIDE:
            return OUTSIDE[component]
        if component not in COMPONENTS:
            known = [*COMPONENTS, *OUTSIDE]
            raise UserError(
                f"component={component} is unknown.{nearest(component, known)} "
                f"Known: {', '.join(known)}."
            )
        return str(Place(layer, COMPONENTS[component]))

    def input_sites(
        self, stage: str, num_layers: int, measured: Block | None = None
    ) -> tuple[Site, ...]:
        """Return the sites that hold what a stage is fed: all the same values, the likeliest first.

        What was ``measured`` of its block counts, else what the family declares.
        """
        place = Place.parse(stage)
        own = place.site("in")
        if place.layer is None:
            before = {NORM: Place(num_layers - 1).site("out"), HEAD: Site(NORM, "out")}
            return tuple(dict.fromkeys((before.get(stage, own), own)))
        block = measured or self.block
        fed = block.fed_to(place.module) if block is not None and place.module else ()
        names: tuple[str, ...] = ()
        if block is not None and len(fed) == 1:
            names = block.same_as(fed[0])
        elif not place.module or (block is None and place.module == "input_layernorm"):
            # The first norm of an unknown block is taken to be fed what the block is.
            names = (":in",)
        # Its own input, where no other value is it.
        sites = (*(Site.inside(place.layer, name) for name in names), own)
        return tuple(dict.fromkeys(sites))

    def present(self, block: nn.Module) -> list[Tap]:
        """Return the taps whose module the block has; of several for one site, the first."""
        modules = {name for name, _ in block.named_modules()}
        found: dict[str, Tap] = {}
        for tap in self.taps:
            if tap.module in modules:
                found.setdefault(tap.local, tap)
        return [*found.values()]

    def sites(self, stage: str, wanted: Callable[..., bool]) -> dict[str, SiteSpec]:
        """Return axes and kind of the wanted sites inside a stage, by their address in the block.

        ``wanted`` is what a port's assets hold of that name. A part that the model lacks is among
        them, and what a family without a file of its own shows beside them is not.
        """
        place = Place.parse(stage)
        if place.layer is None:
            taps = self.taps_outside(stage, wanted)
        else:
            taps = [tap for _, tap in taps_within(place, self.taps, wanted)]
        return {tap.local: tap.spec for tap in taps}

    def taps_outside(self, stage: str, wanted: Callable[..., bool]) -> list[Tap]:
        """Return the wanted taps of a stage outside the blocks: of an embedding of several modules.

        Each is wanted wherever what the first block is fed is.
        """
        several = self.embedding if stage == EMBEDDING else None
        parts = () if several is None else several.parts
        return [
            Tap(part.local, part.module, part.spec)
            for part in parts
            if any(wanted(layer=None, local=each) for each in (part.local, f"{EMBEDDING}:out"))
        ]


def taps_within(
    place: Place, taps: Sequence[Tap], wanted: Callable[..., bool]
) -> list[tuple[str, Tap]]:
    """Return the wanted ones of a block's taps inside a stage, with the module path below it."""
    inside = place.module
    pairs = []
    for tap in taps:
        own_output = inside != "" and tap.local == f"{inside}:out"
        asked = own_output or any(
            wanted(layer=place.layer, local=local)
            for local in (tap.local, *(["mlp:out"] if tap.branch else []))
        )
        if within(tap.module, inside) and asked:
            pairs.append((tap.module.removeprefix(inside).removeprefix("."), tap))
    return pairs


def family_of(model_type: str) -> Family:
    """Return the family of a model type: its own file's, or the shared layout."""
    if model_type in registry.names("anatomy.families"):
        family: Family = registry.load("anatomy.families", model_type).FAMILY
        return family
    return Family(model_type)


def stage_ends(stage: str) -> tuple[str, ...]:
    """Return the ends of a stage that are sites of their own.

    A component's are sites of its block, seen by taps; norm and head take what has a site already.
    """
    if stage in (NORM, HEAD):
        return ("out",)
    place = Place.parse(stage)
    return ("in", "out") if place.layer is None or not place.module else ()


def end_spec(stage: str, end: str) -> SiteSpec:
    """Return axes and kind of what a stage takes in or gives out."""
    if stage == EMBEDDING:
        # The embedding copies rows: anything but equality is a mistake.
        return TOKENS if end == "in" else SiteSpec(HIDDEN.axes, Kind.EXACT)
    return LOGITS if (stage, end) == (HEAD, "out") else HIDDEN
