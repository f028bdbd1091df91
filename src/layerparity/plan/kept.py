"""What a run keeps on disk, and what memory a golden's noise floors take; estimates.

Of T tokens, E elements of sites for each, b bytes an element and w one precision wider:

- tensors: T E b;
- references, on disk: T w times the elements that a stage computes, once fed the golden's own
  input, once chained where the run is, and once for each component that is evaluated alone;
- floors, in memory: T E (w + b (n + 2)) for n clean ways, of the largest stage, and a third more
  for what computing takes beside it, as was measured of a block of Mistral's widths;
  and a mask of a square of w for each sequence.

Where a run stores some tokens alone, T is their number: but for what a stage is fed or told to
choose, and for that third, which are of all; components then have no references of their own.

What only a measurement of a block shows (latent or linear attention) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from layerparity.anatomy.family import CHOICES, EXPERTS, Family, Tap, stage_ends, taps_within
from layerparity.anatomy.site import EMBEDDING, HEAD, Place, within
from layerparity.anatomy.sizes import ModelSizes
from layerparity.making.needs import ITEMSIZE
from layerparity.plan.weights import PlannedModel
from layerparity.record.manifest import SitePatterns

# Clean ways of the run's own type, and of a narrower one; what they take beside what is kept.
_WAYS, _NARROWER, _BESIDE = 3, 4, 1 / 3
_QUERIES = ("q_proj:out", "q_norm:out", ":q_rotated", ":context")
_KEYS = ("k_proj:out", "k_norm:out", ":k_rotated", "v_proj:out")
# Within a dense MLP of a family whose taps are not all there is: what gate, up and the activation
# give, and what down is given.
_WITHIN_MLP = "mlp.act_fn:out"
_OF_MLP = 4
_WEIGHTS = "gate:weights"
_ATTENTION = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of a run's tensors and its references on disk, and of what floors take in memory."""

    tensors: int = 0
    references: int = 0
    memory: int = 0

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return self.tensors + self.references


@dataclass(frozen=True)
class SiteElements:
    """How many elements a stage's sites have for each token, by the component they are in.

    ``given`` is what it is fed, ``chosen`` what others may be told to choose.
    """

    by_component: Mapping[str, int]
    given: int
    chosen: int = 0

    @property
    def all(self) -> int:
        """Of the whole stage."""
        return sum(self.by_component.values()) + self.given

    @property
    def computed(self) -> int:
        """All but what the stage is given."""
        return sum(self.by_component.values())

    @property
    def whole(self) -> int:
        """Those that are stored of all tokens."""
        return self.given + self.chosen

    @property
    def alone(self) -> int:
        """Those of components, which are evaluated alone as well."""
        return sum(count for component, count in self.by_component.items() if component)


def kept_of(
    model: PlannedModel,
    family: Family,
    wanted: SitePatterns,
    dtype: str,
    tokens: int,
    *,
    floors: bool,
    chained: bool,
    components: bool,
    stored: int | None = None,
    sequences: int = 1,
) -> KeptBytes:
    """Return what a run of so many ``tokens`` in all keeps; with ``floors`` it is a golden's.

    Sites are ``stored`` of so many, None for all; tokens are those of so many ``sequences``.
    """
    counted = [elements_of(model, family, stage, wanted) for stage in model.stages]
    item = ITEMSIZE[dtype]
    shown = tokens if stored is None else min(stored, tokens)
    whole = sum(each.whole for each in counted)
    tensors = item * (tokens * whole + shown * (sum(each.all for each in counted) - whole))
    if not floors:
        return KeptBytes(tensors)
    narrow = ITEMSIZE["bfloat16"]
    wide, ways = (8, _WAYS * item + _NARROWER * narrow) if item > narrow else (4, _WAYS * item)
    times = 2 if chained else 1
    alone = sum(each.alone for each in counted) if components and shown == tokens else 0
    computed = sum(each.computed for each in counted[int(model.stages[0] == EMBEDDING) :])
    largest = max(each.all for each in counted)
    held = largest * (wide + ways + 2 * item)
    # The mask of eager attention, which the reference has, is by the square of a text's length.
    mask = tokens * (tokens // sequences) * wide
    memory = int(held * (shown + tokens * _BESIDE)) + mask
    return KeptBytes(tensors, shown * wide * (times * computed + alone), memory)


def elements_of(
    model: PlannedModel, family: Family, stage: str, wanted: SitePatterns
) -> SiteElements:
    """Return how many elements a token has at the wanted sites of a stage."""
    place, sizes = Place.parse(stage), model.sizes
    found: dict[str, int] = {}
    given = chosen = 0
    for end in stage_ends(stage):
        local = f":{end}" if place.layer is not None else f"{stage}:{end}"
        if not wanted(layer=place.layer, local=local):
            continue
        count = sizes.vocabulary if (stage, end) == (HEAD, "out") else sizes.hidden
        if (stage, end) == (EMBEDDING, "in"):
            # Token ids, of eight bytes each, are next to nothing.
            continue
        if end == "in":
            given += count
        else:
            found[""] = found.get("", 0) + count
    for component, count, repeats in _inside(model, family, place, wanted):
        found[component] = found.get(component, 0) + count
        chosen += count if repeats else 0
    return SiteElements(found, given, chosen)


def _inside(
    model: PlannedModel, family: Family, place: Place, wanted: SitePatterns
) -> Iterator[tuple[str, int, bool]]:
    """Yield the components of a block, with the elements of each of their sites for a token.

    Last stands whether others may repeat what is shown there.
    """
    if place.layer is None:
        return
    sizes, stage = model.sizes, str(place)
    names = " ".join(weight.name for weight in model.weights[stage])
    sparse = stage in model.sparse
    for tap in {each.local: each for _, each in taps_within(place, family.taps, wanted)}.values():
        there = f".{tap.module.rpartition('.')[2]}." in f".{names}."
        owned = tap.module.endswith(("_norm", "_layernorm", *_ATTENTION))
        routed = tap.module.startswith("mlp.")
        if (there or not owned) and (sparse or not routed):
            repeats = tap.spec is CHOICES or tap.local.endswith(_WEIGHTS)
            yield tap.module.partition(".")[0], _width(tap, sizes), repeats
    measured = not (family.complete or sparse) and within("mlp", place.module)
    if measured and wanted(layer=place.layer, local=_WITHIN_MLP):
        yield "mlp", _OF_MLP * sizes.intermediate, False


def _width(tap: Tap, sizes: ModelSizes) -> int:
    """Return how many elements a site has for each token."""
    if tap.spec is CHOICES or tap.local.endswith(_WEIGHTS):
        return sizes.top_k
    if tap.spec is EXPERTS:
        return sizes.experts
    if tap.local.endswith(_QUERIES):
        return sizes.heads * sizes.head_dim
    return sizes.kv_heads * sizes.head_dim if tap.local.endswith(_KEYS) else sizes.hidden
