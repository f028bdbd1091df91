"""RunFolder: what is written is read back; a file that is not what it should be is one line."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from runs import make_run, sites

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.ground.files import TensorFiles
from layerparity.ground.profile import RunProfile, Spent, StageProfile
from layerparity.judge import decode_steps
from layerparity.judge.align import Pair
from layerparity.judge.conclude import conclude
from layerparity.judge.evaluate import Measured, measure
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.numbers.floor import Floor
from layerparity.record import folder as names
from layerparity.record.folder import RunFolder
from layerparity.record.loaded import PortLoads
from layerparity.record.manifest import SCHEMA, WeightPrint
from layerparity.record.references import ISOLATED, ReferenceWriter, StoredReferences
from layerparity.record.stored_run import StoredRun, from_folder

STATS = {"mean": 0.5, "std": 1.0, "min": -2.0, "max": 2.0, "l2": 3.0}
EXPECTED = WeightPrint((2, 2), "float32", "aa", STATS, (1.0, 0.5), "layers.0.mlp.w")
PRINT = replace(EXPECTED, digest="bb", checkpoint="differs", stored="float32", expected=EXPECTED)
CONFIG = {
    "kind": "candidate",
    "backend": {"name": "gpu"},
    "model": {"name": "tiny", "path": None},
    "scope": {"kind": "full"},
    "seq_len": 5,
}


def full_run(folder: Path, seed: int = 0) -> StoredRun:
    """Write a run that has every file; the golden's reference is as good as its values."""
    tensors = sites(seed)
    writer = ReferenceWriter(folder)
    floor = Floor(("way",), torch.ones(1, 10), torch.ones(1, 8), {"whole": SlopeSample(0.5, 1)})
    site = Site.parse("layers.0:out")
    writer.write("layers.0", ISOLATED, "layers.0", {site: (tensors[str(site)], {"float32": floor})})
    make_run(folder, tensors, mask=torch.ones(2, 5), reference=writer.finish())
    files = RunFolder(folder)
    files.write_config(CONFIG)
    files.write_prompts(["one", "zwei ü"])
    files.write_effective_weights({"layers.0": {"layers.0.w": PRINT}, "layers.1": {}})
    files.write_profile(RunProfile(3, {"layers.0": StageProfile(1, 2, 3, 4, 5, 6, Spent(1, 2, 3))}))
    files.write_new_texts(["one", "zwei ü"], ["a", "b"])
    files.write_warnings(["mind the gap"])
    return from_folder(folder)


def compare(folder: Path) -> object:
    golden = make_run(folder.parent / "golden", sites())
    return conclude([golden], [from_folder(folder)], FixedTolerance())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_run(tmp_path_factory.mktemp("whole") / "run").folder


def test_a_configuration_of_awkward_texts_is_read_as_it_was_by_both_readers(tmp_path: Path) -> None:
    texts = ["true", "yes", "off", "1e3", "1_000", "0x1f", "-.inf", "nan", "null", "~", "", " a "]
    texts += ["${layer}", "a: b", "# c", "- d", "é 👍", "two\nlines\n", "'", '"', "x " * 90, "1:30"]
    config = {
        "texts": texts,
        "mapping": {text: text for text in texts},
        "others": [None, True, 3, -1.5, 1e30, [], {}, {"deep": [{"er": []}]}],
    }
    files = RunFolder(tmp_path)
    files.write_config(config)
    assert files.read_config() == config
    loaded = OmegaConf.load(tmp_path / "config.yaml")
    assert OmegaConf.to_container(loaded) == config
    with pytest.raises(yaml.representer.RepresenterError):
        files.write_config({"path": tmp_path})


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_what_is_written_is_read_back(run: Path) -> None:
    files = RunFolder(run)
    assert files.read_config() == CONFIG
    assert files.read_prompts() == ["one", "zwei ü"]
    assert files.read_effective_weights() == {"layers.0": {"layers.0.w": PRINT}, "layers.1": {}}
    profile = files.read_profile()
    assert profile is not None and profile.stages["layers.0"].loading == Spent(1, 2, 3)
    assert files.read_used_weights()["norm"] == {"norm.w": "1"}
    mask = files.read_mask()
    assert mask is not None and mask.dtype == torch.bool and mask.shape == (2, 5)
    manifest = files.read_manifest()
    assert set(files.read_inputs(manifest.inputs)) == {"token_ids", "attention_mask"}
    for record in manifest.records:
        assert torch.equal(files.read_tensor(record), sites()[str(record.site)])
    files.write_manifest(manifest)
    # Only what the very same object wrote is vouched for.
    assert files.read_manifest() == replace(manifest, files={})
    stored = StoredReferences(RunFolder(run), manifest.reference)
    entry = stored.find("layers.0", ISOLATED, Site.parse("layers.0:out"))
    assert entry is not None and torch.equal(stored.reference(entry), sites()["layers.0:out"])
    floor = stored.floor(entry, "float32")
    assert (
        floor is not None
        and floor.ways == ("way",)
        and floor.slopes == {"whole": SlopeSample(0.5, 1)}
    )


def test_nothing_is_kept_in_a_file_that_has_no_name_here(run: Path) -> None:
    manifest = RunFolder(run).read_manifest()
    # Only a port of one's own has one.
    RunFolder(run).write_loaded(PortLoads())
    # And only a part of a golden that another one goes on from.
    ReferenceWriter(run).write_states({"float32 plain": torch.zeros(1, 2, 3)})
    known = {
        value
        for key, value in vars(names).items()
        if key.isupper() and isinstance(value, str) and "." in value
    }
    known |= {record.file for record in manifest.records}
    known.add(names.reference_file("layers.0", ISOLATED))
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert found == known


def test_optional_files_may_be_absent(run: Path) -> None:
    for name in (names.CONFIG, names.PROMPTS, names.USED_WEIGHTS, names.EFFECTIVE_WEIGHTS):
        (run / name).unlink()
    (run / names.PROFILE).unlink()
    raw = json.loads((run / names.MANIFEST).read_text())
    (run / names.MANIFEST).write_text(json.dumps({**raw, "files": {}}))
    files = RunFolder(run)
    assert (files.read_config(), files.read_prompts()) == ({}, [])
    assert (files.read_used_weights(), files.read_effective_weights()) == ({}, {})
    assert files.read_profile() is None
    compare(run)


# ---------------------------------------------------------------- other versions


ABSENT = object()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (SCHEMA + 1, f"was written by a newer layerparity (schema {SCHEMA + 1}; this one reads "),
        (SCHEMA - 1, f"was written by an older layerparity (schema {SCHEMA - 1}; this one reads "),
        (ABSENT, "was written by an older layerparity (schema 0; this one reads "),
        ("3", "is damaged (schema is not a whole number): make the run again."),
        (None, "is damaged (schema is not a whole number): make the run again."),
    ],
)
def test_a_folder_of_another_schema_says_what_to_do(run: Path, schema: object, says: str) -> None:
    path = run / names.MANIFEST
    raw = json.loads(path.read_text())
    del raw["schema"]
    # What another version had is no matter: the schema is looked at first.
    other = {} if schema is ABSENT else {"schema": schema}
    path.write_text(json.dumps({**raw, **other, **({"new": 1} if "layerparity" in says else {})}))
    said = one_line(lambda: RunFolder(run).read_manifest())
    assert says in said and said.startswith(str(path))
    cure = "update layerparity." if schema == SCHEMA + 1 else "make the run again."
    assert said.endswith(cure)


# ---------------------------------------------------------------- damaged files


def one_line(read: Callable[[], object]) -> str:
    """Return the one line in which reading ends, or an empty text where it does not."""
    try:
        read()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


READERS: dict[str, Callable[[RunFolder], object]] = {
    names.MANIFEST: RunFolder.read_manifest,
    names.CONFIG: RunFolder.read_config,
    names.INPUTS: lambda files: files.read_inputs(files.read_manifest().inputs),
    names.PROMPTS: RunFolder.read_prompts,
    names.USED_WEIGHTS: RunFolder.read_used_weights,
    names.EFFECTIVE_WEIGHTS: RunFolder.read_effective_weights,
    names.PROFILE: RunFolder.read_profile,
    names.REFERENCE_INDEX: lambda files: StoredReferences(files, files.read_manifest().reference),
    names.stage_file("norm.out.0"): lambda files: [
        files.read_tensor(record) for record in files.read_manifest().records
    ],
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "no text": lambda content: b"\xff\xfe\x00" + content,
    "other text": lambda content: b"no {JSON",
    "a list": lambda content: b"[1]",
    "deep": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_one_line_with_its_name_and_a_cure(
    run: Path, name: str, how: str
) -> None:
    if (name, how) == (names.CONFIG, "half"):
        pytest.skip("half of a YAML file is YAML")
    path = run / name
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    said = one_line(lambda: READERS[name](RunFolder(run)))
    assert said.startswith(f"{path} is damaged (") and "make the run again" in said


@pytest.mark.parametrize(
    "name", [names.INPUTS, names.REFERENCE_INDEX, "tensors/norm.out.0.safetensors"]
)
def test_a_file_that_is_gone_is_one_line(run: Path, name: str) -> None:
    (run / name).unlink()
    said = one_line(lambda: READERS[name](RunFolder(run)))
    assert said == f"{run / name} is missing: make the run again."


def test_a_run_without_a_manifest_did_not_finish(run: Path) -> None:
    (run / names.MANIFEST).unlink()
    said = one_line(lambda: RunFolder(run).read_manifest())
    assert said == f"No manifest.json in {run}: the run did not finish; run it again."


@pytest.mark.parametrize("name", [names.INPUTS, names.stage_file("norm.out.0")])
def test_altered_bytes_are_seen(run: Path, name: str) -> None:
    content = bytearray((run / name).read_bytes())
    content[-1] ^= 1
    (run / name).write_bytes(content)
    said = one_line(lambda: READERS[name](RunFolder(run)))
    assert "its bytes are not those the manifest lists): make the run again." in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"records": [1]}, "records[0] is not an object"),
        ({"weights": {"norm": 3}}, "weights.norm is not text"),
        ({"layer_experts": {"one": 3}}, "layer_experts.one is not under a whole number"),
        ({"model": {"name": "x"}}, "model.model_type is missing"),
        ({"synthetic": 1}, "synthetic is not true or false"),
        ({"stages": []}, "it lists no stages"),
        ({"more": 1}, "more is not known"),
    ],
)
def test_a_wrong_type_is_said_with_its_place(run: Path, change: dict[str, Any], says: str) -> None:
    path = run / names.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    said = one_line(lambda: RunFolder(run).read_manifest())
    assert said == f"{path} is damaged ({says}): make the run again."


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    # Of a list the first and the last stand for all.
    if isinstance(value, list):
        inner = {0: value[0], len(value) - 1: value[-1]}.items() if value else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def mutated(raw: object, place: tuple[Any, ...], other: object) -> object:
    if not place:
        return other
    changed: Any = copy.deepcopy(raw)
    at = changed
    for key in place[:-1]:
        at = at[key]
    if other is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = other
    return changed


@pytest.mark.parametrize(
    "name",
    [names.MANIFEST, names.CONFIG, names.USED_WEIGHTS, names.EFFECTIVE_WEIGHTS, names.PROFILE],
)
def test_no_wrong_value_ends_a_comparison_in_a_traceback(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, path = make_run(run.parent / "golden", sites()), run / name
    if name != names.MANIFEST:
        # Of tensors that nobody changed the same is measured each time.
        known: dict[Site, Measured] = {}

        def once(pair: Pair, *given: Any, **more: Any) -> Measured:
            if pair.site not in known:
                known[pair.site] = measure(pair, *given, **more)
            return known[pair.site]

        monkeypatch.setattr(decode_steps, "measure", once)
    raw = yaml.safe_load(path.read_text())
    refused = 0
    for place in places(raw):
        for other in ([], "layers.9.mlp", -1, None, ...):
            if other is ... and not place:
                continue
            path.write_text(json.dumps(mutated(raw, place, other)))
            said = one_line(lambda: conclude([golden], [from_folder(run)], FixedTolerance()))
            refused += bool(said)
    assert refused or name == names.PROFILE


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", [names.MANIFEST, names.EFFECTIVE_WEIGHTS])
def test_a_command_ends_with_2_and_one_line(
    cli: Callable[..., Any], run: Path, name: str, how: str
) -> None:
    golden = make_run(run.parent / "golden", sites()).folder
    (run / name).write_bytes(DAMAGE[how]((run / name).read_bytes()))
    ended = cli("job=compare", f"golden={golden}", f"candidate={run}", "tolerance=fixed")
    assert (ended.exit, "Traceback" in ended.err) == (2, False), ended.err
    (said,) = [line for line in ended.err.splitlines() if line.startswith("layerparity: ")]
    assert said.startswith(f"layerparity: {run / name} is damaged (")
    assert said.endswith("make the run again.")


@pytest.mark.parametrize(
    ("schema", "cure"), [(SCHEMA + 1, "update layerparity."), (SCHEMA - 1, "make the run again.")]
)
def test_a_command_on_a_folder_of_another_schema_ends_with_2_and_one_line(
    cli: Callable[..., Any], run: Path, schema: int, cure: str
) -> None:
    golden = make_run(run.parent / "golden", sites()).folder
    raw = json.loads((run / names.MANIFEST).read_text())
    (run / names.MANIFEST).write_text(json.dumps({**raw, "schema": schema}))
    ended = cli("job=compare", f"golden={golden}", f"candidate={run}", "tolerance=fixed")
    assert (ended.exit, "Traceback" in ended.err) == (2, False), ended.err
    (said,) = [line for line in ended.err.splitlines() if line.startswith("layerparity: ")]
    assert said.startswith(f"layerparity: {run / names.MANIFEST} ")
    assert said.endswith(cure)


def test_where_a_file_lies_is_asked_once_for_all_of_its_tensors(tmp_path: Path) -> None:
    """A tensor that the file found does not hold, as on a server, is asked for by itself."""
    RunFolder(tmp_path).write_tensors("whole.safetensors", {"a": torch.ones(2), "b": torch.ones(3)})
    RunFolder(tmp_path).write_tensors("part.safetensors", {"c": torch.ones(4)})
    asked: list[str] = []

    def where(_file: str, name: str) -> Path:
        asked.append(name)
        return tmp_path / ("part.safetensors" if name == "c" else "whole.safetensors")

    files = TensorFiles(where)
    sizes = [files.read("tensors", name)[1].numel() for name in ("a", "b", "a", "c", "c", "b")]
    assert sizes == [2, 3, 2, 4, 4, 3]
    assert asked == ["a", "c", "b"]
