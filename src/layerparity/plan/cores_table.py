"""Print how NxDI lays a model over Neuron cores: what is padded, repeated, and paid for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerparity.anatomy.shards import Strategy
from layerparity.ground import console
from layerparity.machine.trainium import GIB
from layerparity.plan.core_share import CoreLayout
from layerparity.plan.deployments import CoreCost, Deployment
from layerparity.plan.fit import FitReport
from layerparity.plan.table import signed

Row = tuple[str, ...]
_MOST = 8


def show_cores(report: FitReport) -> None:
    """Print the layout over the asked tp_degree, its price, and every instance."""
    layout, cost = report.question.layout, report.cost
    degree, ep = layout.degree, layout.ep
    by = f"tp_degree={degree}" if ep == 1 else f"tp_degree={degree}, moe_ep_degree={ep}"
    columns = ("size", "is", "becomes", "a core has", "how")
    console.table(f"NxDI's layout, {by}", columns, [*_head_rows(layout), *_other_rows(report)])
    if layout.heads.converts:
        console.say(
            f"tp_degree={degree} converts to MHA: NxDI, as it was read, makes K and V too long "
            f"and refuses their shapes; of a multiple of {layout.heads.kv} it repeats them"
        )
    if cost is not None and degree > 1:
        _show_cost(cost)
    _show_instances(report.instances, report.question.dtype)
    known = ", ".join(map(str, report.degrees[:_MOST]))
    more = f", ... ({len(report.degrees)} up to {report.degrees[-1]})"
    console.say(
        f"NxDI takes tp_degree={known}{more if len(report.degrees) > _MOST else ''}"
        f"{f' with moe_ep_degree={ep}' if ep > 1 else ''}"
        if report.degrees
        else f"NxDI takes no tp_degree with moe_ep_degree={ep}"
    )


def _head_rows(layout: CoreLayout) -> Iterator[Row]:
    heads, degree = layout.heads, layout.degree
    zeros, query = heads.padded_query - heads.query, heads.padded_query
    how = ""
    if zeros and heads.strategy is Strategy.replicate:
        group = heads.query // heads.kv
        how = f"{zeros} heads of zeros, {zeros // heads.kv} after the {group} of each KV head"
    elif zeros:
        how = f"{zeros} heads of zeros, after all others"
    yield "query heads", f"{heads.query}", f"{query}", f"{query // degree}", how
    held, how = heads.held_kv, ""
    if held != heads.kv and heads.strategy is Strategy.replicate:
        how = f"each on {degree // heads.kv} cores in a row"
    elif held != heads.kv:
        pads = held - heads.query
        how = f"converted to MHA: one for each query head{f', {pads} of zeros' if pads else ''}"
    yield "KV heads", f"{heads.kv}", f"{held}", f"{held // degree}", how


def _other_rows(report: FitReport) -> Iterator[Row]:
    layout, odd = report.question.layout, {row.what for row in report.misfits}
    sizes, degree, ep = layout.sizes, layout.degree, layout.ep
    parts = {"experts": ep, "intermediate size of an expert": degree // ep}
    named = {**{k: v for k, v in sizes.divided.items() if "heads" not in k}}
    if sizes.experts:
        if "intermediate size of an expert" not in named:
            named["intermediate size of an expert"] = named.pop("intermediate size")
        named["experts"] = sizes.experts
    for what, size in named.items():
        part = parts.get(what, degree)
        core = "does not divide" if what in odd else f"{size // part}"
        if size % part and what not in odd:
            # No weight of the scope is that wide.
            continue
        yield what, f"{size}", f"{size}", core, "" if part > 1 or degree == 1 else "all of them"
    padded = {
        "embedding's channels": (sizes.hidden, layout.width),
        "vocabulary of the head": (sizes.vocabulary, layout.vocabulary),
    }
    for what, (size, grown) in padded.items():
        how = f"{grown - size} of zeros" if grown > size else ""
        yield what, f"{size}", f"{grown}", f"{grown // degree}", how


def _show_cost(cost: CoreCost) -> None:
    rows = [(cause.value, f"{size:,}", "") for cause, size in cost.added.items()]
    added = sum(cost.added.values())
    rows = [
        ("an even part", f"{cost.even:,}", f"{cost.even_cache:,}"),
        *rows,
        ("beyond an even part", f"{added:,}", f"{cost.added_cache:,}"),
    ]
    console.table("What a core holds, bytes", ("", "weights", "KV cache"), rows)
    more = 100 * added / cost.even if cost.even else 0.0
    console.say(
        f"a core pays {console.bytes_text(added)} of weights ({more:.1f} %) and "
        f"{console.bytes_text(cost.added_cache)} of cache for what does not divide"
    )


def _show_instances(rows: Sequence[Deployment], dtype: str) -> None:
    columns = ("instance", "LNC", "cores", "a core has", "needs", "headroom", "fits", "from")
    table = []
    for row in rows:
        lacks = f"no: {row.cores} cores" if row.cores < row.degree else "no"
        table.append(
            (
                row.instance.name,
                f"{row.lnc}",
                f"{row.cores}",
                f"{row.each / GIB:g} GiB",
                console.bytes_text(row.needed),
                signed(row.headroom),
                "yes" if row.fits else lacks,
                "none" if row.smallest is None else f"tp_degree={row.smallest}",
            )
        )
    console.table(f"Neuron instances, {dtype}, logical cores", columns, table)
