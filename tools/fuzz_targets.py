"""What `tools/fuzz.py` feeds: every reader of words and files, with a good example to spoil."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz import damaged, mutated, words

Reading = tuple[Callable[[], object], str]
Target = Callable[[random.Random], Reading]
ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "checkpoints" / "tiny_minimax_m2"
RUN = ROOT / "tests" / "masters" / "runs" / "spoken"


def targets(folder: Path) -> dict[str, Target]:
    """Return every reader by name: from a source of chance to a reading and the input it gets."""
    return {**_commands(), **_of_runs(folder), **_of_checkpoints(folder), **_of_dumps(folder)}


def _file(folder: Path, good: Path | bytes, name: str, read: Callable[[Path], object]) -> Target:
    """Return the target that spoils one file, ``name`` in the folder, and reads it."""
    content = good if isinstance(good, bytes) else good.read_bytes()
    is_json = name.endswith(".json")

    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    # Unspoilt it reads; what that imports takes seconds, once.
    read(path)

    def make(maker: random.Random) -> Reading:
        spoilt = mutated(maker, content, is_json)
        path.write_bytes(spoilt)
        return (lambda: read(path)), spoilt[:300].decode(errors="replace")

    return make


def _commands() -> dict[str, Target]:
    from layerparity.cli import command
    from layerparity.settings import config, search_path

    config.register()
    search_path.register()
    keys = config.every_key()
    _compose(["layer=1", "scope=single"])

    def checked(maker: random.Random) -> Reading:
        line = words(maker, keys)
        return (lambda: command.check(line)), " ".join(line)

    def composed(maker: random.Random) -> Reading:
        line = [word for word in words(maker, keys) if not word.startswith("-")]
        return (lambda: _compose(line)), " ".join(line)

    return {"command line": checked, "overrides": composed}


def _compose(line: list[str]) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from layerparity.cli import command
    from layerparity.settings import config

    command.check(line)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
            config.checked(compose("config", overrides=line))
    except (HydraException, OmegaConfBaseException) as error:
        raise command.explain(error) from error
    except Exception as error:
        mistake = command.blame(line)
        if mistake is None:
            raise
        raise mistake from error


def _of_runs(folder: Path) -> dict[str, Target]:
    from layerparity.record.verdict import Verdict

    run, bare = folder / "run", folder / "bare"
    verdict = _verdict().encode()
    effective = RUN / "effective_weights.json"
    readers: dict[str, tuple[Path | bytes, str, Callable[[Path], object]]] = {
        "manifest": (RUN / "manifest.json", "manifest.json", _read_run),
        "verdict.json": (verdict, "verdict.json", Verdict.read),
        "config.yaml": (RUN / "config.yaml", "config.yaml", lambda p: _bare(p).read_config()),
        "weights.json": (
            RUN / "weights.json",
            "weights.json",
            lambda p: _bare(p).read_used_weights(),
        ),
        "effective": (
            json.dumps(_first(effective)).encode(),
            "effective_weights.json",
            lambda p: _bare(p).read_effective_weights(),
        ),
        "progress": (_progress(), "progress.json", _read_progress),
    }
    return {
        name: _file(run if name == "manifest" else bare, good, file, read)
        for name, (good, file, read) in readers.items()
    }


def _bare(path: Path) -> Any:
    from layerparity.record.folder import RunFolder

    return RunFolder(path.parent)


def _read_run(path: Path) -> object:
    from layerparity.ground.files import inside
    from layerparity.record.stored_run import from_folder

    manifest = from_folder(path.parent).read_manifest()
    return [(inside(path.parent, each.file), each.site.layer) for each in manifest.records]


def _progress() -> bytes:
    """Return the lines of an interrupted run's journal, as a JSON list without their hashes."""
    manifest = json.loads((RUN / "manifest.json").read_text(encoding="utf-8"))
    names = ("references", "warnings", "weights", "tensors_used", "effective", "skipped", "profile")
    stage: dict[str, Any] = {name: [] if name in names[:2] else {} for name in names}
    stage |= {
        "name": "layers.0",
        "feeds": manifest["feeds"][:2],
        "records": manifest["records"][:2],
    }
    stage["weights"] = manifest["weights"]
    return json.dumps([{"fingerprint": "f", "threads": 1, "processor": "p"}, stage]).encode()


def _read_progress(path: Path) -> object:
    """Read lines as if they had been written so, each with its hash."""
    from layerparity.ground.files import text_digest
    from layerparity.record.progress import read_progress

    text = path.read_bytes().decode("utf-8", "replace")
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        listed = None
    lines = [json.dumps(each) for each in listed] if isinstance(listed, list) else [text] * 2
    last, journal = "", path.parent / ".progress" / "journal"
    journal.parent.mkdir(exist_ok=True)
    with journal.open("w", encoding="utf-8") as file:
        for line in lines:
            last = text_digest(last + line)
            file.write(f"{last} {line}\n")
    return [
        record.site.layer for each in read_progress(path.parent).stages for record in each.records
    ]


def _first(path: Path) -> dict[str, Any]:
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {stage: dict(list(named.items())[:3]) for stage, named in list(raw.items())[:3]}


def _verdict() -> str:
    from layerparity.judge.conclude import conclude
    from layerparity.judge.tolerances.fixed import FixedTolerance
    from layerparity.record.stored_run import from_folder

    runs = [from_folder(RUN), from_folder(RUN.parent / "spoken-right")]
    return conclude(runs[:1], runs[1:], FixedTolerance()).to_json()


def _of_checkpoints(folder: Path) -> dict[str, Target]:
    import torch
    from safetensors.torch import save

    from layerparity.checkpoint.headers import read_shard_header
    from layerparity.model.checkpoint import INDEX
    from layerparity.model.header import read_header

    place = folder / "model"
    head = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})
    index = json.dumps({"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}})
    (_with_config(place / "i") / "x.safetensors").write_bytes(head)
    return {
        "header": _file(place / "h", head, "h.safetensors", read_header),
        "audited header": _file(place / "h", head, "a.safetensors", read_shard_header),
        "index": _file(place / "i", index.encode(), INDEX, _open),
        "config.json": _file(place / "c", TINY / "config.json", "config.json", _config),
        "tokenizer": _tokenizer(place / "t"),
        "chat template": _template(place / "m"),
    }


def _with_config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    return folder


def _open(path: Path) -> object:
    from layerparity.model.checkpoint import Checkpoint

    return Checkpoint(path.parent).tensors


def _config(path: Path) -> object:
    from layerparity.making.request.scope import num_layers_of
    from layerparity.model.architecture import read_config
    from layerparity.model.checkpoint import Checkpoint

    values = Checkpoint(path.parent).config
    return num_layers_of(values), read_config(values)


def _tokenizer(folder: Path) -> Target:
    from layerparity.model.tokenizer import load_tokenizer, tokenizer_errors

    _with_config(folder)
    (folder / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())

    def read(path: Path) -> object:
        with tokenizer_errors(path.parent):
            return load_tokenizer(path.parent)("Some words")

    return _file(folder, TINY / "tokenizer.json", "tokenizer.json", read)


def _template(folder: Path) -> Target:
    from layerparity.making.inputs import _chat
    from layerparity.model.tokenizer import load_tokenizer

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        _with_config(folder).joinpath(name).write_bytes((TINY / name).read_bytes())
    tokenizer = load_tokenizer(folder)
    # A template without end is refused before it counts as a hang.
    _chat.SECONDS = 3.0

    def read(path: Path) -> object:
        tokenizer.chat_template = path.read_text(encoding="utf-8", errors="replace")
        return _chat.dress(tokenizer, ["Hello"], folder)

    return _file(folder, TINY / "chat_template.jinja", "chat_template.jinja", read)


def _of_dumps(folder: Path) -> dict[str, Target]:
    import io

    import numpy as np
    import torch
    from safetensors.torch import save

    from layerparity.ground.files import read_tensors
    from layerparity.making.inputs.tokens import read_rows
    from layerparity.record.dump_files import NpzFile, read_npy, read_pt
    from layerparity.record.name_map import read_map

    npy = io.BytesIO()
    np.save(npy, np.arange(6).reshape(2, 3))
    packed, saved = io.BytesIO(), io.BytesIO()
    np.savez_compressed(packed, a=np.arange(6).reshape(2, 3))
    torch.save({"a": torch.arange(6.0), "b": [torch.ones(2)]}, saved)
    place, names = folder / "dump", b'{"layer_{n}_output": "layers.{n}:out", "x": "norm:out"}'
    tensors = save({"input_ids": torch.arange(6).reshape(2, 3)})
    good = {
        "ids.json": b"[[1, 2, 3], [4, 5, 6]]",
        "ids.npy": npy.getvalue(),
        "i.safetensors": tensors,
    }
    made = {f"tokens {name}": _file(place, each, name, read_rows) for name, each in good.items()}
    return {
        "npy": _file(place, npy.getvalue(), "a.npy", read_npy),
        "npz": _file(place, packed.getvalue(), "a.npz", lambda path: NpzFile(path).read("a")),
        "pt": _file(place, saved.getvalue(), "a.pt", read_pt),
        "safetensors": _file(place, tensors, "a.safetensors", read_tensors),
        "names.json": _file(place, names, "names.json", read_map),
        "names.yaml": _file(place, b"a: norm:out\nb: lm_head:out\n", "names.yaml", read_map),
        "site": _site,
        **made,
    }


def _site(maker: random.Random) -> Reading:
    from layerparity.anatomy.site import Site
    from layerparity.ground.errors import UserError

    text = damaged(maker, b"layers.7.mlp.gate:logits@decode.3").decode(errors="replace")

    def read() -> object:
        try:
            return str(Site.parse(text).place)
        except ValueError as error:
            raise UserError(" ".join(str(error).split())) from error

    return read, text
