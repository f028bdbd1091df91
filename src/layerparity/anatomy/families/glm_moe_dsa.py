"""GLM-5: attention to chosen tokens; from 5.2 on some blocks take those that another chose."""

from dataclasses import replace

from layerparity.anatomy.families import deepseek_v32
from layerparity.anatomy.family import ATTENDED, CHOSEN_TOKENS, Tap, Values
from layerparity.anatomy.site import Place

_FULL, _OFFSET = "full", "index_skip_topk_offset"

# What attention takes that chooses no tokens itself.
_TAKEN = Tap(ATTENDED, "self_attn", CHOSEN_TOKENS, of_input=True, argument="prev_topk_indices")


def _handers(values: Values, layer: int) -> list[str]:
    """Return the block whose chosen tokens a block looks at, where it chooses none itself.

    ``indexer_types`` says which choose; without it, ``index_topk_pattern`` has a letter for each
    block, or every ``index_topk_freq``-th does: see transformers' ``GlmMoeDsaConfig``.
    """
    kinds = values.get("indexer_types")
    if pattern := None if kinds else values.get("index_topk_pattern"):
        kinds = [_FULL if each in ("F", _FULL) else "" for each in pattern]
    if not kinds:
        every, offset = int(values.get("index_topk_freq") or 1), values.get(_OFFSET, 2)
        counts = range(int(values["num_hidden_layers"]))
        kinds = [_FULL if max(n - offset + 1, 0) % max(every, 1) == 0 else "" for n in counts]
    if layer >= len(kinds) or kinds[layer] == _FULL:
        return []
    return [str(Place(n)) for n in range(layer) if kinds[n] == _FULL][-1:]


FAMILY = replace(
    deepseek_v32.FAMILY,
    model_type="glm_moe_dsa",
    taps=(*deepseek_v32.FAMILY.taps, _TAKEN),
    handers=_handers,
)
