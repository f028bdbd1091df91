"""llama.cpp: the tensors that a callback saw (``cb_eval``), each under the graph's name for it.

Names are ``l_out-3``, ``result_norm``: files of such names, or keys in one. The tensors have tokens
and no sequences. Queries and keys are left out: the graph calls them ``Qcur`` and ``Kcur`` before
their rotation and after it, and a GGUF of a Llama has their channels in another order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.files import file_notes
from layerparity.record.dump_files import SUFFIXES, find_tensors, names_in
from layerparity.record.dump_format import GRAPH_FILE, OPERANDS
from layerparity.record.engines.base import Captures, Given, by_name
from layerparity.record.name_map import Names

TITLE = "tensors that llama.cpp's cb_eval saw"
_NAME = re.compile(
    r"(?:l_out|attn_norm|ffn_(?:inp|norm|out|moe_out)|attn_out|kqv_out)-\d+|result_(?:norm|output)"
)
# How many files are looked at, where their keys tell what they hold.
_FEW = 4
_TABLE: Names = {
    "inp_tokens": "embed_tokens:in",
    "inp_scaled": "embed_tokens:out",
    "inp_embd": "embed_tokens:out",
    "embd": "embed_tokens:out",
    "attn_norm-{n}": "layers.{n}.input_layernorm:out",
    "Vcur-{n}": "layers.{n}.self_attn.v_proj:out",
    "attn_out-{n}": "layers.{n}.self_attn:out",
    "attn_post_norm-{n}": "layers.{n}.post_attention_layernorm:out",
    "ffn_inp-{n}": "layers.{n}.post_attention_layernorm:in",
    "ffn_norm-{n}": "layers.{n}.post_attention_layernorm:out",
    "ffn_up-{n}": "layers.{n}.mlp.up_proj:out",
    "ffn_gate-{n}": "layers.{n}.mlp.gate_proj:out",
    "ffn_out-{n}": "layers.{n}.mlp:out",
    "ffn_moe_logits-{n}": "layers.{n}.mlp.gate:logits",
    "ffn_moe_topk-{n}": "layers.{n}.mlp.gate:choices",
    # The first of these that there is weighs the experts.
    "ffn_moe_weights_scaled-{n}[:, :, 0]": "layers.{n}.mlp.gate:weights",
    "ffn_moe_weights_norm-{n}": "layers.{n}.mlp.gate:weights",
    "ffn_moe_weights_softmax-{n}[:, :, 0]": "layers.{n}.mlp.gate:weights",
    "ffn_moe_out-{n}": "layers.{n}.mlp.experts:out",
    "l_out-{n}": "layers.{n}:out",
    "result_norm": "norm:out",
    "result_output": "lm_head:out",
}
# Whether attention's sum is seen before its projection or behind it, its name alone does not say.
_CONTEXT: Names = {"kqv_out-{n}": "layers.{n}.self_attn:context"}
# Where each part's output is normed before it is added, the norm before the MLP has another name.
_NORMED_AFTER: Names = {
    "ffn_norm-{n}": "layers.{n}.pre_feedforward_layernorm:out",
    "sa_out-{n}": "layers.{n}.pre_feedforward_layernorm:in",
    "ffn_post_norm-{n}": "layers.{n}.post_feedforward_layernorm:out",
}
# A router that takes the softmax of what it chose: its scores, with their bias, are renamed.
_CHOSEN_FIRST: Names = {"ffn_moe_probs-{n}": "layers.{n}.mlp.gate:logits"}
_LEFT = {
    "Qcur": "Qcur and Kcur are left out: rotated or not, and in a GGUF's own order of channels",
    "kqv_out": "kqv_out is left out: without attn_out nothing says on which side of the projection "
    "it stands",
    "ffn_moe_weights": "ffn_moe_weights are left out: record what is made of them as well "
    "(ffn_moe_weights_norm, _scaled), or give them a site in a name map",
}


def matches(folder: Path) -> bool:
    """Say whether a file, or a key in the first of a few, has a name of the graph's."""
    files = sorted(each for each in folder.iterdir() if each.suffix in SUFFIXES)
    if any(_NAME.fullmatch(each.stem) for each in files):
        return True
    packed = [each for each in files if each.suffix != ".npy"]
    try:
        keys = names_in(packed[0]) if 0 < len(packed) <= _FEW else ()
    except UserError:
        return False
    return any(_NAME.fullmatch(key) for key in keys)


def read(given: Given) -> Captures:
    """Return what the callback saw. Raises UserError for a file that is damaged."""
    tensors = [
        replace(each, names=(each.key or each.path.stem, *each.names))
        for each in find_tensors(given.folder)
    ]
    kinds = {each.names[0].partition("-")[0] for each in tensors}
    table = {**_TABLE}
    left = {"Qcur", "kqv_out"} & kinds
    if "attn_out" in kinds:
        table, left = {**table, **_CONTEXT}, left - {"kqv_out"}
    if "ffn_post_norm" in kinds:
        table |= _NORMED_AFTER
    if {"ffn_moe_weights_softmax", "ffn_moe_probs"} <= kinds:
        del table["ffn_moe_logits-{n}"]
        table |= _CHOSEN_FIRST
    if not any(kind.startswith("ffn_shexp") for kind in kinds):
        # Where no expert is shared, that is all that the MLP puts out.
        table["ffn_moe_out-{n}"] = ["layers.{n}.mlp.experts:out", "layers.{n}.mlp:out"]
    if not any(kind.startswith("ffn_moe_weights_") for kind in kinds):
        left |= {"ffn_moe_weights"} & kinds
    notes = [_LEFT[kind] for kind in sorted(left)]
    captures = by_name(given, tensors, table, notes=notes, rows=given.rows())
    return replace(captures, operands=_operands(given.folder))


def _operands(folder: Path) -> tuple[str, ...]:
    """Return what products round their operands to, as our recorder wrote beside the tensors."""
    path = folder / GRAPH_FILE
    return tuple(file_notes(path).get(OPERANDS, "").split()) if path.is_file() else ()
