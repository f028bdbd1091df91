"""Fixtures: small checkpoints, and the command line run inside this process."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import composing
import folders
import nursery
import pytest
from filelock import FileLock

from layerparity.machine.neuron_defaults import numbers
from layerparity.machine.neuron_flavour import NATIVE_TORCH
from layerparity.settings import command_keys

if TYPE_CHECKING:
    from layerparity.record.verdict import Verdict

# accelerate imports torch_xla wherever it is installed; only the neuron backend wants it.
os.environ["USE_TORCH_XLA"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Once torch has asked CUDA itself for GPUs, no process that is forked later can use one.
if Path("/dev/nvidiactl").exists():
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# torch keeps what it compiled by the processor, and not by what it is told of it: it would crash.
if _told := os.environ.get("ATEN_CPU_CAPABILITY"):
    _cache = Path(tempfile.gettempdir(), f"torchinductor-{os.getuid()}-{_told}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache))
BESIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share_cores(workers: int) -> None:
    """Have libraries take a worker's share of the cores: more threads only wait for one another."""
    share = str(max(1, (os.cpu_count() or 1) // workers))
    for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "NUMBA", "BLIS"):
        os.environ.setdefault(f"{library}_NUM_THREADS", share)
    # A test that takes two threads all the same has them sleep where another worker computes: as
    # they wait by default, a recital of 62 blocks takes 18 s of CPU beside others, and 2 s alone.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


if BESIDE > 1:
    share_cores(BESIDE)

# A shell gives what it runs in the background no Ctrl-C, nor what that starts; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
# What a process of its own is given where six blocks tell what 62 would.
SMALL = "model=tiny_minimax_m2"
# `make test-native` and `make test-engines` run these, with a newer torch than torch_xla wants.
_NEWER = (numbers(version("torch")) or (0, 0)) >= NATIVE_TORCH
collect_ignore = [*([] if _NEWER else ["native"]), *([] if find_spec("litgpt") else ["engines"])]
# Workers take files in this order, the others after them: what takes longest comes first, so that
# no worker is left with it when the other has nothing to do.
LONGEST = (
    "test_docs.py",
    "test_small_runs.py",
    "test_replays.py",
    "test_nxdi.py",
    "test_slurm.py",
    "test_neuron_run.py",
    "test_cluster.py",
    "test_team_commands.py",
    "test_captures.py",
    "test_bisect.py",
    "test_shipped_checkpoints.py",
    "test_nxdi_compiled.py",
    "test_stream.py",
    "test_compiled.py",
    "test_report_browser.py",
    "test_silent_passes.py",
    "test_chained_dumps.py",
    "test_hub.py",
    "test_tracking.py",
    "test_ui.py",
    "test_gpu_backend.py",
)


# What the test that runs now is marked with.
_marks: set[str] = set()
nursery.keep_nothing_safe()
composing.remember()
_usual = command_keys._usual_options
command_keys._usual_options = lambda: composing.with_default_model(_usual())
NURSERY = nursery.mine()
# A million imported objects are here, and a run has the collector look through them all again.
gc.set_threshold(700, 10, 100)
nursery.install(NURSERY, is_fresh=lambda: "fresh_interpreter" in _marks)


def pytest_configure(config: pytest.Config) -> None:
    """Name our marks; prepare for workers, which are forks that have imported, too."""
    workers = config.getoption("numprocesses", None)
    if isinstance(workers, int) and workers > 1:
        share_cores(workers)
    config.addinivalue_line(
        "markers", "fresh_interpreter: what it starts is no fork of a process that has imported"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note the marks of the test that begins."""
    _marks.clear()
    _marks.update(mark.name for mark in item.iter_markers())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first where workers share the work."""
    if BESIDE > 1:
        rank = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def patient() -> None:
    """Try every known mistake, however busy the machine; how many there is time for has a test."""
    from layerparity.making import replay

    replay._PATIENCE = 1e6


@pytest.fixture
def no_mistakes_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant no known mistake: hundreds of them take seconds, and no cause is read."""
    from layerparity.making import replay

    monkeypatch.setattr(replay, "_PATIENCE", 0.0)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a family's small checkpoint, made once."""
    base = tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> Path:
        folder = base / family
        return folder if folder.is_dir() else folders.FAMILIES[family](folder)

    return make


@dataclass
class Ended:
    """How a command ended and what it said."""

    exit: int
    out: str
    err: str


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Run a command line in this process, from an empty folder."""
    monkeypatch.chdir(tmp_path)
    # A port of the user's own is looked for in the folder the command runs in, and only there.
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> Ended:
        from hydra.core.global_hydra import GlobalHydra

        from layerparity.cli.door import main

        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        GlobalHydra.instance().clear()
        capsys.readouterr()
        code = int(main())
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return run


@pytest.fixture(autouse=True)
def nothing_typed() -> Iterator[None]:
    """Forget what a test typed: Hydra keeps it for as long as the process lives."""
    yield
    if "hydra.core.hydra_config" in sys.modules:
        from hydra.core.hydra_config import HydraConfig

        HydraConfig.instance().cfg = None


@pytest.fixture(autouse=True)
def threads_given_back() -> Iterator[None]:
    """Leave torch the threads that it had: more of them than cores only wait."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let torch have so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs of a file's tests."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if BESIDE > 1 else base


@pytest.fixture
def run(cli: Callable[..., Ended], store: Path, shared: Path) -> Callable[..., Ended]:
    """The command line over a store with one full golden run of every component, ``the-golden``."""
    if not (store / "mlflow.db").exists():
        golden = ("capture=components", "generate.max_new_tokens=6", "name=the-golden")
        shutil.copytree(_golden(cli, shared, golden), store, dirs_exist_ok=True)
    return lambda *arguments: cli(f"tracking.folder={store}", *arguments)


@pytest.fixture
def golden_here(cli: Callable[..., Ended], shared: Path) -> Callable[..., None]:
    """Put a store here, or there, in which these words made a golden run of the shipped model.

    All who ask for the same have copies of one, which the first of them makes.
    """

    def put(*words: str, to: str | Path = "mlruns") -> None:
        shutil.copytree(_golden(cli, shared, words), to, dirs_exist_ok=True)

    return put


def _golden(cli: Callable[..., Ended], shared: Path, words: tuple[str, ...]) -> Path:
    """Return a store with one golden run, which the first who asks for it makes."""
    folder = shared / f"golden-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            half = folder.with_suffix(".part")
            ended = cli("backend=gpu", "device_map=cpu", f"tracking.folder={half}", *words)
            assert ended.exit == 0, ended.err
            half.rename(folder)
    return folder


def first_blocks(folder: Path, count: int) -> Path:
    """Copy the shipped checkpoint to a folder; it ends behind its first blocks."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(ROOT / "checkpoints" / "tiny_minimax_m2", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    weights = folder / "model.safetensors"
    late = tuple(f"model.layers.{n}." for n in range(count, config["num_hidden_layers"]))
    kept = {k: v for k, v in load_file(weights).items() if not k.startswith(late)}
    save_file(kept, weights, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def three_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the shipped model that ends behind its third block."""
    return first_blocks(tmp_path_factory.mktemp("three") / "three_blocks", 3)


@pytest.fixture(scope="session")
def concluded() -> Callable[[Path, str, str], Verdict]:
    """Return a function that gives the verdict on two runs of a store, by their names.

    It is that of ``job=compare`` with its defaults, as read back from JSON; nothing is kept or
    shown.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from layerparity.ground.resources import shipped
    from layerparity.judge.conclude import conclude
    from layerparity.making.replay import replays
    from layerparity.making.steps import composed
    from layerparity.record.verdict import Verdict
    from layerparity.settings import search_path
    from layerparity.settings.config import register
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    register()
    search_path.register()

    def judge(store: Path, golden: str, candidate: str) -> Verdict:
        runs = open_store(TrackingConfig(folder=str(store)))
        sides = [[runs.find(name)[0]] for name in (golden, candidate)]
        GlobalHydra.instance().clear()
        # A block that is computed again with known mistakes is composed as well.
        with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
            limits = composed({}).tolerance
            verdict = conclude(*sides, limits, portrait=True, replays=replays)
        return Verdict.from_json(verdict.to_json())

    return judge


@pytest.fixture(scope="session")
def two_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the shipped model that ends behind its second block."""
    return first_blocks(tmp_path_factory.mktemp("two") / "two_blocks", 2)
