"""Say how much of a candidate's error routing alone explains, by running it with the golden's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import Exit, UserError
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("golden", "candidate", "name", "port")


@dataclass
class Settings:
    """conf/job/routing.yaml."""

    name: str = "routing"


# Of the candidate's keys, what its runs with the golden's routing have as well; their capture is
# their own, and what they are fed is the golden's.
_SCOPE = ("component", "end", "feed", "generate", "layer", "scope", "start")


def run(config: Config) -> Exit:
    """Run the candidate with the golden's choices, and with all of its routing; print the errors.

    Raises UserError where a side is not one run, where the candidate has no routing of its own or
    kept no keys, and where its port cannot repeat a golden's.
    """
    from layerparity.judge.conclude import paired
    from layerparity.judge.routing_share import EVERYTHING, IDS, NATURAL, routing_shares
    from layerparity.judge.sides import open_sides
    from layerparity.making import steps
    from layerparity.report.refusals import obstacles_in_words
    from layerparity.report.routing_share import study
    from layerparity.tracking.opening import open_store

    store = open_store(config.tracking)
    golden, natural = _sides(config, store)
    kept = {k: v for k, v in steps.own_settings(config).items() if k.startswith("tracking")}
    keys = {**_keys(golden, natural, config), **kept}
    with obstacles_in_words():
        paired([golden], [natural])
    tags = {"golden": golden.id, "candidate": natural.id, "model": natural.tags.get("model", "")}
    title = config.name or f"routing of {natural.name}"
    with store.start(title, "routing", tags, {}) as active:
        runs = {NATURAL: natural}
        for name, value in ((IDS, True), (EVERYTHING, "all")):
            runs[name] = steps.make(store, active.id, {**keys, "port.replay": value})
        opened = {name: open_sides([golden], [each]) for name, each in runs.items()}
        sides = {name: candidate for name, (_, candidate) in opened.items()}
        shares = routing_shares(opened[NATURAL][0], sides)
        if not shares:
            raise UserError(
                f"'{golden.name}' and '{natural.name}' share no block's output and no logits",
                "make both with capture=default.",
            )
        judged = {"golden": golden.id[:8], "candidate": runs[EVERYTHING].id[:8]}
        found = study(shares, steps.command({"job": "compare", **judged, **kept}))
        found.keep(active)
    return found.show(active, config.tracking)


def _sides(config: Config, store: Store) -> tuple[StoredRun, StoredRun]:
    """Return the golden and the candidate, one run each."""
    from layerparity.judge.choose import chosen_sides
    from layerparity.report.refusals import obstacles_in_words

    with obstacles_in_words():
        golden, candidate, _ = chosen_sides(config, store)
    for side, runs in (("golden", golden), ("candidate", candidate)):
        if len(runs) > 1:
            raise UserError(
                f"job=routing runs one candidate again, and {side}= names {len(runs)} runs",
                "name one run.",
            )
    return golden[0], candidate[0]


def _keys(golden: StoredRun, natural: StoredRun, config: Config) -> dict[str, Any]:
    """Return the keys of the candidate's further runs.

    Its folder may be somebody else's: the port is this package's, or the one that ``config`` names.
    """
    from layerparity.making import steps
    from layerparity.ports.replay_keys import shows_weights
    from layerparity.settings.command_keys import settings_of

    stored = natural.files.read_config() if natural.id or natural.files.is_run else None
    if not stored:
        raise UserError(f"'{natural.name}' kept no keys", "name a run of layerparity's own.")
    if natural.read_manifest().numerics.get("replay"):
        raise UserError(
            f"'{natural.name}' was routed as its golden", "name the run that routed by itself."
        )
    manifest = golden.read_manifest()
    if not manifest.layer_experts:
        raise UserError(f"'{golden.name}' has no experts: nothing is routed in it.")
    if not shows_weights(manifest.model.model_type):
        raise UserError(
            f"{manifest.model.model_type} does not show what its routers weigh their experts by",
            "port.replay=true repeats the choices alone, and job=compare judges that.",
        )
    keys = settings_of(stored)
    steps.refuse_code(natural, keys, config, "add {} to this command, if it is yours")
    own = {*steps.COMPUTATION, *_SCOPE} - {"capture"}
    kept = {k: v for k, v in keys.items() if k.lstrip("+").partition(".")[0] in own}
    return {**kept, "kind": "candidate", "inputs": "golden", "golden": golden.reference}
