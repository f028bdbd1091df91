"""Which passes of a served model are of one batch of prompts, and how serving engines name sites.

Their norms add the residual, and put out the normed tokens and the stream behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from layerparity.ground.errors import UserError
from layerparity.record.dump_files import Dumped
from layerparity.record.engines.base import Captures, Given, by_name, stream
from layerparity.record.name_map import Names

LOGITS = "logits_processor"
_MLPS = ("mlp", "block_sparse_moe")
SERVED: Names = {
    # The stream stands before sums that may be a rounding off it: it is what a block got.
    **stream(),
    "input_ids": "embed_tokens:in",
    "layers.{n}.input_layernorm.out/0": "layers.{n}.input_layernorm:out",
    "layers.{n}.in/1 + layers.{n}.in/2": "layers.{n}:in",
    "layers.{n}.post_attention_layernorm.out/0": "layers.{n}.post_attention_layernorm:out",
    "layers.{n}.self_attn.attn.out": "layers.{n}.self_attn:context",
    **{
        f"layers.{{n}}.{mlp}.{module}": f"layers.{{n}}.mlp{local}"
        for mlp in _MLPS
        for module, local in {
            "act_fn.out": ".down_proj:in",
            "topk.out/0": ".gate:weights",
            "topk.out/1": ".gate:choices",
        }.items()
    },
    "norm.out/0": "norm:out",
    "model.out": "norm:out",
    f"{LOGITS}.out": "lm_head:out",
}


class ServedPrompts(NamedTuple):
    """``rows`` are the prompts' numbers of tokens, ``steps`` a pass's step by its number.

    Step 0 is the prefill, in which all tokens stand one behind the other; without rows, they have
    an axis of sequences beside theirs.
    """

    rows: tuple[int, ...]
    steps: Mapping[int, int]
    notes: tuple[str, ...]

    def holds(self, step: int, shape: Sequence[int], module: str) -> bool:
        """Say whether a tensor of such a shape has a row for each token of a step.

        Logits may have one for each sequence.
        """
        if not self.rows:
            return True
        tokens = len(self.rows) if step else sum(self.rows)
        last = len(self.rows) if module.startswith(LOGITS) else tokens
        return bool(shape) and shape[0] in (tokens, last)


def prompt_rows(positions: Sequence[int]) -> tuple[int, ...]:
    """Return how many tokens each prompt of a prefill has; nothing where a pass is none.

    An engine's rehearsal has tokens at position 0 alone.
    """
    rows: list[int] = []
    for position in positions:
        if position == 0:
            rows.append(1)
        elif rows and position == rows[-1]:
            rows[-1] += 1
        else:
            return ()
    return tuple(rows) if max(rows, default=0) > 1 else ()


def served_prompts(given: Given, passes: Mapping[int, Sequence[int]]) -> ServedPrompts:
    """Return which passes are of one batch of prompts, by the positions of each one's tokens.

    Of several batches, the one that was fed as the command says. Raises UserError where there is
    none, where nothing says which is meant, and where a step is missing.
    """
    folder = given.folder
    prefills = {number: rows for number in sorted(passes) if (rows := prompt_rows(passes[number]))}
    if not prefills:
        raise UserError(
            f"{folder}: no pass holds whole prompts, from position 0 on",
            "record from the first pass on, without prefix caching, chunked prefill or decode "
            "steps in the same pass.",
        )
    first = _chosen(given, prefills)
    rows, steps = prefills[first], {first: 0}
    for number in sorted(each for each in passes if each > first):
        ahead = [at - end for at, end in zip(passes[number], rows, strict=False)]
        beyond = ahead[0] - len(steps) + 1 if ahead else 0
        if len(passes[number]) != len(rows) or len({*ahead}) != 1 or beyond < 0:
            break
        if beyond:
            raise UserError(
                f"{folder} holds decode step {len(steps) + beyond} (pass {number}) and no step "
                f"{len(steps)}",
                "keep each pass of one run, or leave those behind the gap out.",
            )
        steps[number] = len(steps)
    left = len(passes) - len(steps)
    notes = (f"{left} passes of other requests, or chunks, are left out",) if left else ()
    return ServedPrompts(rows, steps, notes)


def _chosen(given: Given, prefills: Mapping[int, tuple[int, ...]]) -> int:
    """Return the number of the prefill that is meant. Raises UserError where nothing says it."""
    if len(prefills) == 1:
        return next(iter(prefills))
    told = "; ".join(" + ".join(map(str, rows)) for rows in dict.fromkeys(prefills.values()))
    found = f"{given.folder} holds {len(prefills)} prefills, of {told} tokens"
    try:
        fed = tuple(given.fed())
    except UserError as error:
        raise UserError(
            found,
            "say which is meant (inputs=tokens inputs.file=, or prompt.text=), or record without "
            "the server's warm-up (--skip-server-warmup).",
        ) from error
    fits = [number for number, rows in prefills.items() if rows == fed]
    if not fits:
        raise UserError(
            f"{found}, and {' + '.join(map(str, fed))} were fed",
            "give the tokens that were served, with those put before a prompt; record without "
            "prefix caching and chunked prefill.",
        )
    # A rehearsal of the same request comes before it.
    return fits[-1]


class ModuleOutput(NamedTuple):
    """One tensor of a module, or that it was given: ``name`` is its module and, behind a dot, its
    end. It lies under ``key`` in a file, or alone; ``hooked`` says that each pass has to have it.
    """

    path: Path
    key: str | None
    name: str
    shape: Sequence[int]
    step: int
    rank: int = 0
    stage: int = 0
    hooked: bool = True


def served_captures(
    given: Given,
    outputs: Sequence[ModuleOutput],
    prompts: ServedPrompts,
    notes: Sequence[str] = (),
    table: Names = SERVED,
) -> Captures:
    """Return an engine's tensors by site. Raises UserError where a rank or a pass lacks one."""
    found: dict[tuple[str, int, int], Dumped] = {}
    stages: dict[int, dict[tuple[int, int], set[str]]] = {}
    for each in outputs:
        path = each.path.relative_to(given.folder).with_suffix("").as_posix()
        plain = (path,) if each.key is None else (f"{path}/{each.key}",)
        # What has no row for each token is known by its plain name alone.
        known = not each.hooked or prompts.holds(each.step, each.shape, each.name)
        names = (each.name, *plain) if known else plain
        # Of a module that is called again, the first call counts.
        at = (each.name, each.rank, each.step)
        found.setdefault(at, Dumped(each.path, each.key, names, each.rank, each.step))
        if each.hooked:
            held = stages.setdefault(each.stage, {}).setdefault((each.rank, each.step), set())
            held.add(each.name)
    of = _ranks(given, outputs)
    for stage in stages.values():
        _refuse_halves(given, stage)
    rows = prompts.rows or None
    told = (*prompts.notes, *notes)
    return by_name(given, list(found.values()), table, notes=told, rows=rows, of=of)


def _refuse_halves(given: Given, held: Mapping[tuple[int, int], Collection[str]]) -> None:
    """Raise UserError where a rank's pass lacks a module that another one has.

    ``held`` are modules by rank and step. Logits may be written with the next pass.
    """
    modules = {
        key: {n for n in names if not n.startswith((LOGITS, "model.out"))}
        for key, names in held.items()
    }
    (rank, step), first = next(iter(modules.items()))
    for (other, at), own in modules.items():
        if own != first:
            name = min(own ^ first)
            lacks = (rank, step) if name in own else (other, at)
            where = f"decode step {lacks[1]}" if lacks[1] else "the prefill"
            raise UserError(
                f"{given.folder}: {where} of rank {lacks[0]} holds no {name}, which others hold",
                "copy every file of one run, of each rank and pass.",
            )


def _ranks(given: Given, outputs: Sequence[ModuleOutput]) -> int:
    """Return how many ranks there were, where the first is alone; 0 where all are there.

    Raises UserError where several hold fewer queries, keys and values than the model has: a rank
    that is missing leaves no other trace, as others do not tell how many there were.
    """
    if given.sizes is None:
        return 0
    ranks = 1 + max((each.rank for each in outputs), default=0)
    whole = (given.sizes.heads + 2 * given.sizes.kv_heads) * given.sizes.head_dim
    for each in outputs:
        if each.name.endswith(".qkv_proj.out") and ranks * each.shape[-1] < whole:
            if ranks == 1 and (of := given.ranks_of(each.shape[-1])):
                return of
            raise UserError(
                f"{given.folder}: {each.name} has {ranks * each.shape[-1]} of {whole} channels on "
                f"{ranks} rank(s)",
                "copy every rank's files of one run, or name the model that was run.",
            )
    return 0
