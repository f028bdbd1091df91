"""One rank of a transformers model, its blocks split by transformers' own tensor parallel plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerparity.anatomy.site import Place
from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.anatomy.split_plan import plan_of
from layerparity.backends.base import Backend
from layerparity.backends.export import mapped
from layerparity.ground.errors import UserError
from layerparity.machine import neuron_packages, rendezvous
from layerparity.machine.device import Placed
from layerparity.model import static_experts
from layerparity.numbers.rank_parts import WHOLE, PartKind, RankShare
from layerparity.ports.base import Assets, Call
from layerparity.ports.known.hf import HfPort
from layerparity.ports.ranks.side import Held, RankAssets, RankObserved, RankSide
from layerparity.settings.config import Config, DType, FeedMode

if TYPE_CHECKING:
    from layerparity.ports.observed.static_cache import HfCache

# By site, the width that all ranks have together, in heads or channels.
_HEADS = {
    "self_attn.q_proj:out": "heads",
    "self_attn.k_proj:out": "kv_heads",
    "self_attn.v_proj:out": "kv_heads",
    "self_attn.q_norm:out": "heads",
    "self_attn.k_norm:out": "kv_heads",
    "self_attn:q_rotated": "heads",
    "self_attn:k_rotated": "kv_heads",
    "self_attn:context": "heads",
}
# The bytes that rows of a matrix are a multiple of, where torch multiplies matrices by groups.
_MM = 16


class HfRank(RankSide):
    """Runs transformers' modules; `RankDevice` splits each block after its weights are loaded."""

    # torch_neuronx is imported in each rank: what is there before a fork belongs to all of them.
    environment: Mapping[str, str] = {
        "GLOO_SOCKET_IFNAME": "lo",
        # accelerate imports torch_xla wherever it is installed, which takes seconds.
        "USE_TORCH_XLA": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }

    def __init__(
        self,
        assets: RankAssets,
        *,
        device: str,
        collectives: str,
        implementations: Mapping[str, Any],
        by_number: bool = False,
        launched: bool = False,
    ) -> None:
        super().__init__(assets)
        self.collectives, self.launched = collectives, launched
        # A rank on Neuron has one logical core, which its runtime picks by LOCAL_RANK.
        where = f"{device}:{assets.rank}" if device == "cuda" else device
        self.backend = RankDevice(name="gpu", device=where, count=assets.count, by_number=by_number)
        # What the run registered with transformers is not known in this process.
        static_experts.register()
        config = Config(dtype=DType(assets.dtype), feed=FeedMode.auto, **implementations)
        own = Assets(assets.checkpoint, assets.family, self.backend, config, assets.wanted)
        self.port = HfPort(own)
        self._cache: HfCache | None = None

    @classmethod
    def prepare(cls, keys: Mapping[str, Any]) -> None:
        """Import what every rank needs."""
        import transformers.distributed.tensor_parallel
        import transformers.modeling_utils  # noqa: F401

    def start(self) -> dict[str, str]:
        """Join the ranks: through NCCL on GPUs, gloo on the CPU, Neuron's own on its cores."""
        from torch.distributed import FileStore, init_process_group
        from torch.distributed.device_mesh import init_device_mesh

        kind, library = self.backend.device.partition(":")[0], self.collectives
        if kind == "cuda":
            # A device mesh knows the kind alone: each process's device is its current one.
            torch.cuda.set_device(self.assets.rank)
        rank, count, facts = self.assets.rank, self.assets.count, {"collectives": library}
        files = FileStore(self.assets.rendezvous, count)
        if self.launched:
            self._served = rendezvous.tell(rank, count, files)
            facts["rendezvous"] = f"env://{rendezvous.HERE}, as torchrun tells"
        if kind == "neuron":
            neuron_packages.native()
        store = None if self.launched else files
        init_process_group(library, store=store, rank=rank, world_size=count)
        self.backend.mesh = init_device_mesh(kind, (count,), mesh_dim_names=("tp",))
        return facts

    def place(self, stages: Sequence[str]) -> int:
        """Find the stages' tensors; return the bytes of all of them."""
        return sum(each.bytes for each in self.port.place(stages))

    def load(self, stage: str) -> dict[str, str]:
        """Fill the stage's modules and split them; return what the checkpoint's tensors held."""
        return self.port.load(stage)

    def held(self, stage: str) -> dict[str, Held]:
        """Return what this rank holds; every rank has to take part in gathering what is split."""
        skeleton, checkpoint = self.port.skeleton, self.assets.checkpoint
        module = skeleton.module(stage)
        found = {}
        for name, each in (*module.named_parameters(), *module.named_buffers()):
            whole, own = self._gathered(each)
            weight = skeleton.weight(stage, name)
            values = skeleton.as_stored(checkpoint, weight, whole)
            # The mask is taken apart like the values, so that each stored tensor has its own.
            masks = skeleton.as_stored(checkpoint, weight, own)
            for stored, value in values.items():
                right, mask = checkpoint.value(stored, value.dtype), masks[stored] > 0
                differs = not torch.equal(value[mask], right[mask])
                found[stored] = Held(value, mask, f"{stage}.{name}", differs)
        return found

    def _gathered(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a parameter whole, of all ranks that share it, and 1 where this rank holds it."""
        held = value.detach()
        if not hasattr(held, "full_tensor"):
            return held.cpu(), torch.ones_like(held, device="cpu")
        whole: torch.Tensor = held.full_tensor().cpu()
        # Each rank fills its own part with its own number, whatever the parts are.
        split: Any = torch.full_like(held, float(self.assets.rank))
        owner: torch.Tensor = split.full_tensor().cpu()
        # What is replicated is everybody's, and the gathered ranks are each one's own.
        return whole, (owner == self.assets.rank).to(whole.dtype)

    def new_cache(self, batch: int, max_tokens: int) -> None:
        """Make transformers' static cache, of this rank's own heads."""
        self._cache = self.port.new_cache(batch, max_tokens)

    def begin(self, call: Call) -> None:
        """Prepare a pass."""
        self.port.begin(replace(call, cache=self._cache if call.cache else None))

    def run(self, stage: str, given: torch.Tensor) -> RankObserved:
        """Run one stage on [batch, token, channel], or ids int64 [batch, token]."""
        observed = self.port.run(stage, given)
        sizes, count = self.port.skeleton.sizes, self.assets.count
        shares = {
            local: share_of(local, value, sizes, self.assets.rank, count)
            for local, value in observed.tensors.items()
        }
        tensors, specs = dict(observed.tensors), dict(observed.specs)
        return RankObserved(
            observed.output.cpu(), WHOLE, tensors, specs, shares, dict(observed.unseen)
        )

    def release(self, stage: str) -> None:
        """Forget the stage's weights."""
        self.port.release(stage)


def share_of(
    local: str, value: torch.Tensor, sizes: ModelSizes, rank: int, count: int
) -> RankShare:
    """Return which part of a site's tensor, [batch, token, ...], rank ``rank`` of ``count`` has."""
    if local not in _HEADS:
        return WHOLE
    whole = getattr(sizes, _HEADS[local]) * (1 if value.dim() == 4 else sizes.head_dim)
    own = int(value.shape[2])
    # A plan may gather a projection: MiniMax-M2 norms queries and keys over all heads.
    if own * count != whole:
        return WHOLE
    return RankShare(PartKind.SHARDED, 2, tuple(range(rank * own, rank * own + own)))


@dataclass
class RankDevice(Backend):
    """One rank's device; a stage that is put there is split as transformers' plan says.

    ``by_number`` shares experts as its plan of expert parallelism says: whole ones.
    """

    device: str = "cpu"
    count: int = 1
    by_number: bool = False
    mesh: Any = None
    _plan: dict[str, str] = field(default_factory=dict)
    _experts: dict[str, str] = field(default_factory=dict)

    def open(self) -> None:
        """Take nothing: the process group is joined by `HfRank.start`."""

    def close(self) -> None:
        """Give nothing back: the process ends."""

    @property
    def device_label(self) -> str:
        """The device's name in torch."""
        return self.device

    def check(self, model: nn.Module) -> None:
        """Refuse a model without a plan, and heads that the ranks cannot share evenly."""
        config: Any = model.config
        sizes = sizes_of(config)
        self._plan = plan_of(config)
        if not self._plan:
            raise UserError(
                f"tp_degree={self.count}: transformers has no tensor parallel plan for "
                f"{config.model_type}",
                "use tp_degree=1.",
            )
        if self.by_number:
            self._experts = dict(config.get_text_config().base_model_ep_plan or {})
            if not self._experts:
                raise UserError(
                    f"moe_ep_degree={self.count}: transformers has no expert parallel plan for "
                    f"{config.model_type}",
                    "use moe_ep_degree=1.",
                )
            # Experts that are shared by number are not cut by width as well.
            self._plan = {k: v for k, v in self._plan.items() if k not in self._experts}
        # What the plan gathers may be cut anywhere: heads are taken apart behind that.
        split = {style for name, style in self._plan.items() if name.endswith(".k_proj")}
        if "colwise" in split and (sizes.kv_heads % self.count or sizes.heads % self.count):
            raise UserError(
                f"tp_degree={self.count} does not divide {sizes.heads} attention heads and "
                f"{sizes.kv_heads} KV heads, and transformers pads and replicates none",
                "use a degree that does, or port.emulate_tp.",
            )
        if sizes.experts and not self.by_number:
            self._refuse_narrow(model, sizes.expert_intermediate)

    def _refuse_narrow(self, model: nn.Module, width: int) -> None:
        """Refuse slices of experts, ``width`` channels in all, that grouped_mm does not take."""
        config: Any = model.config
        channels, rest = divmod(width, self.count)
        size = channels * next(model.parameters()).dtype.itemsize
        grouped = config._experts_implementation in (None, "grouped_mm")
        # torch would refuse them as strides of a product, in the middle of a run.
        if not grouped or not (rest or size % _MM):
            return
        held = f"{channels} of {width} channels of an expert, {size} bytes"
        if rest:
            held = f"{channels} or {channels + 1} of {width} channels of an expert"
        raise UserError(
            f"tp_degree={self.count} gives a rank {held}, and torch's grouped_mm takes multiples "
            f"of {_MM} bytes",
            "use another degree, or experts_implementation=batched_mm.",
        )

    def place(self, model: nn.Module, stages: Mapping[str, str]) -> list[Placed]:
        """Place every stage on the rank's own device."""
        sizes = {
            stage: sum(
                each.numel() * each.element_size()
                for each in model.get_submodule(path).parameters()
            )
            for stage, path in stages.items()
        }
        return [Placed(self.device, tuple(stages), sum(sizes.values()))]

    def put(self, stage: str, module: nn.Module) -> None:
        """Move a stage's module to the device and split what the plan names in it."""
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        # Each rank has loaded all of it and keeps its part: nothing is sent between ranks.
        module.to(self.device)
        place = Place.parse(stage)
        # The plan names what is in blocks; all else is whole on every rank.
        if place.layer is None:
            return
        prefix = f"layers.*.{place.module}." if place.module else "layers.*."
        inside = {name.removeprefix(prefix): style for name, style in self._plan.items()}
        # A rule of a module is one of its own parameters as well.
        plan = {
            name: inside.get(name) or inside[name.rpartition(".")[0]]
            for name, _ in module.named_parameters()
            if name in inside or name.rpartition(".")[0] in inside
        }
        # transformers cuts what is named as a parameter, and lets a module gather or add up that is
        # named as one: a projection needs both.
        plan |= {name: inside[name] for name, _ in module.named_modules() if name in inside}
        apply_tensor_parallelism(module, self.mesh, plan)
        known = {name for name, _ in (*module.named_parameters(), *module.named_modules())}
        owned = {name.removeprefix(prefix): style for name, style in self._experts.items()}
        # transformers fails on a name that is not there, and a dense block has no experts.
        by_number = {name: style for name, style in owned.items() if name in known}
        if by_number:
            # One mesh for both: all ranks have the same tokens, and what experts give is summed.
            apply_expert_parallelism(module, self.mesh, self.mesh, by_number)

    def send(self, stage: str, value: Any) -> Any:
        """Return tensors of any shape and dtype, nested or not, on the device."""
        return mapped(value, lambda tensor: tensor.to(self.device))

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors, of any shape and dtype, on the CPU."""
        return {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
