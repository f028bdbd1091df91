"""port=hf: transformers' own modules, loaded stage by stage and run on the backend's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.config import DType
from layerparity.errors import UserError
from layerparity.models.families.base import HIDDEN, Family, Tap
from layerparity.models.skeleton import Skeleton, read_config
from layerparity.ports.base import Assets, Call, Observed, Port
from layerparity.site import Site, SiteSpec

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache

    from layerparity.backends.base import Backend, Placed

_OUTPUT = "__output__"
CHOICES = "mlp.gate:choices"
WEIGHTS = "mlp.gate:weights"


@dataclass
class Settings:
    """conf/port/hf.yaml."""

    name: str = "hf"


def build(settings: Settings, assets: Assets) -> HfPort:
    """Return the port over the checkpoint's architecture."""
    return HfPort(assets)


class HfPort(Port):
    """transformers' modules, on a skeleton that is filled one stage at a time."""

    def __init__(self, assets: Assets) -> None:
        import torch

        config, backend = assets.config, assets.backend
        self.assets = assets
        self.skeleton = Skeleton(
            read_config(assets.checkpoint.config),
            getattr(torch, config.dtype.value),
            config.attn_implementation or backend.attn_implementation,
            config.experts_implementation or _experts(backend, config.dtype),
            assets.family.float32_patterns,
        )
        self._stages: dict[str, Any] = {}
        self._taps: dict[str, list[tuple[str, Tap]]] = {}
        self._arguments: list[dict[str, Any]] = []
        self._sent: dict[tuple[int, ...], Any] = {}
        self._call: Call | None = None

    def place(self, stages: Sequence[str]) -> list[Placed]:
        """Find every stage's tensors in the checkpoint and let the backend place the stages."""
        backend = self.assets.backend
        backend.check(self.skeleton.model)
        for stage in stages:
            self.skeleton.sources(self.assets.checkpoint, stage)
        self._mention_homeless()
        return backend.place(
            self.skeleton.model, {stage: self.skeleton.path(stage) for stage in stages}
        )

    def load(self, stage: str) -> dict[str, str]:
        """Fill the stage's modules from the checkpoint and put them in their place."""
        from layerparity.ports._observe import ObservedStage

        hashes = self.skeleton.load(self.assets.checkpoint, stage)
        module = self.skeleton.module(stage).requires_grad_(False)
        self.assets.backend.put(stage, module)
        self._taps[stage] = taps_of(self.assets.family, self.skeleton, stage, self.assets.wanted)
        self._stages[stage] = ObservedStage(module, self._taps[stage])
        return hashes

    def release(self, stage: str) -> None:
        """Forget the stage's weights."""
        self._stages.pop(stage, None)
        self.assets.backend.release(stage)
        self.skeleton.unload(stage)

    def begin(self, call: Call) -> None:
        """Let transformers make the masks, positions and rotary tables, once, on the host."""
        from layerparity.models.arguments import block_arguments

        past = call.cache.host if call.cache is not None else None
        self._call = call
        self._sent.clear()
        self._arguments = block_arguments(
            self.skeleton, call.attention_mask, call.position_ids, past
        )

    def run(self, stage: str, given: torch.Tensor) -> Observed:
        """Run one stage; the tensors come back in canonical layout on the CPU."""
        import torch

        assert self._call is not None, "begin() comes before run()"
        backend = self.assets.backend
        arguments = self._arguments_of(stage)
        if given.is_floating_point():
            # What a golden recorded may be wider, or narrower, than this run.
            given = given.to(self.skeleton.dtype)
        sent = backend.send(stage, given)
        runnable = self._stages[stage]
        if isinstance(runnable, torch.nn.Module):
            runnable = self._stages[stage] = backend.compile(runnable, (sent, arguments))
        try:
            with torch.no_grad():
                output, seen = runnable(sent, arguments)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{stage} ran out of memory while computing: use a smaller seq_len or batch, or "
                "max_memory= to leave more room beside the weights."
            ) from error
        if self._call.cache is not None and _is_block(stage):
            self._call.cache.note(stage, self._call.tokens)
        fetched = backend.fetch({**seen, _OUTPUT: output})
        fetched.pop(_OUTPUT)
        return self._canonical(stage, output, fetched)

    def _mention_homeless(self) -> None:
        """Say which of the checkpoint's tensors the architecture has no place for."""
        names = self.skeleton.homeless
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.assets.backend.warnings.append(
                f"The checkpoint's {names[0]}{more} belong to no module of "
                f"{self.skeleton.config.model_type}: they are not used."
            )

    def new_cache(self, batch: int, max_tokens: int) -> HfCache:
        """Return transformers' static cache with a host-side twin that only counts."""
        return HfCache(self.skeleton, max_tokens)

    def _arguments_of(self, stage: str) -> dict[str, Any]:
        layer = Site(stage, "in").layer
        component = Site(stage, "in").component
        if layer is None or component not in ("", "self_attn"):
            return {}
        arguments = self._arguments[layer]
        key = (
            layer if self.assets.backend.spreads else 0,
            *(id(value) for value in arguments.values()),
        )
        if key not in self._sent:
            # Blocks share their masks and tables: one copy on the device serves them all.
            self._sent[key] = self.assets.backend.send(stage, arguments)
        sent = dict(self._sent[key])
        if self._call is not None and self._call.cache is not None:
            sent["past_key_values"] = self._call.cache.device
        return sent

    def _canonical(self, stage: str, output: Any, seen: dict[str, torch.Tensor]) -> Observed:
        assert self._call is not None
        tensors: dict[str, torch.Tensor] = {}
        specs: dict[str, SiteSpec] = {}
        unseen: dict[str, str] = {}
        for _, tap in self._taps[stage]:
            if tap.local not in seen:
                unseen[tap.local] = f"{tap.module} gives no such tensor here"
                continue
            value = _layout(tap, seen[tap.local], self._call)
            tensors[tap.local] = value
            specs[tap.local] = _spec(tap, value)
        _sort_routing(tensors, unseen)
        return Observed(output, tensors, specs, unseen)


class HfCache:
    """transformers' static cache on the device, and a host-side twin that only counts tokens."""

    def __init__(self, skeleton: Skeleton, max_tokens: int) -> None:
        from transformers import StaticCache

        self.device: Cache = StaticCache(config=skeleton.config, max_cache_len=max_tokens)
        self.host: Cache = StaticCache(config=skeleton.config, max_cache_len=max_tokens)

    def note(self, stage: str, tokens: int) -> None:
        """Count tokens a block has cached, where the next pass's masks are made from."""
        import torch

        layer = Site(stage, "in").layer
        assert layer is not None
        twin = self.host.layers[layer]
        seen = int(twin.cumulative_length) if twin.is_initialized else 0
        twin.cumulative_length = torch.tensor(seen + tokens)
        twin.is_initialized = True


def taps_of(family: Family, skeleton: Skeleton, stage: str, wanted: Any) -> list[tuple[str, Tap]]:
    """Return the wanted taps inside a stage, each with its module path below the stage."""
    site = Site(stage, "in")
    if site.layer is None:
        return []
    inside = site.component
    found = []
    for tap in family.present(skeleton.module(f"layers.{site.layer}")):
        below = tap.module == inside or tap.module.startswith(f"{inside}.") or not inside
        own_output = inside != "" and tap.local == f"{inside}:out"
        if below and (own_output or wanted(layer=site.layer, local=tap.local)):
            found.append((tap.module.removeprefix(inside).removeprefix("."), tap))
    return found


def _experts(backend: Backend, dtype: DType) -> str | None:
    # The grouped matrix product that is transformers' default does not exist in float64.
    chosen = backend.experts_implementation
    return "eager" if chosen is None and dtype is DType.float64 else chosen


def _is_block(stage: str) -> bool:
    return Site(stage, "in").layer is not None


def _layout(tap: Tap, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a tensor with batch and token first; routers and experts see tokens flattened."""
    if tap.attention in ("query", "key"):
        value = value.transpose(1, 2)[:, : call.tokens]
    elif value.dim() == 2:
        value = value.reshape(call.batch, call.tokens, -1)
    return value.contiguous()


def _spec(tap: Tap, value: torch.Tensor) -> SiteSpec:
    if tap.spec is HIDDEN and value.dim() == 4:
        return SiteSpec(("batch", "token", "head", "channel"))
    return tap.spec


def _sort_routing(tensors: dict[str, torch.Tensor], unseen: dict[str, str]) -> None:
    """Sort each token's experts by id, their weights with them: top-k order is undefined."""
    if CHOICES not in tensors:
        if tensors.pop(WEIGHTS, None) is not None:
            unseen[WEIGHTS] = f"has no order of its own: capture {CHOICES} too"
        return
    tensors[CHOICES], order = tensors[CHOICES].sort(dim=-1)
    if WEIGHTS in tensors:
        tensors[WEIGHTS] = tensors[WEIGHTS].gather(-1, order)
