"""Let Hydra find experiments/ and ``device_map=cuda:N`` from any directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from layerparity.ground.errors import UserError
from layerparity.ground.quoting import typed
from layerparity.ground.resources import shipped

GROUP = "experiment"
_SEARCHPATH = "hydra.searchpath="
_CUDA = re.compile(r"^device_map/(cuda:\d+)(?:\.yaml)?$")


def experiment_folders() -> list[Path]:
    """Return the folders experiments are found in: the user's own first, then the shipped."""
    own, ours = Path.cwd() / "experiments", shipped("experiments")
    return [own, ours] if own.is_dir() and own.resolve() != ours.resolve() else [ours]


def given_folders(config_dir: str | None, overrides: Sequence[str]) -> list[Path]:
    """Return the folders of groups that ``--config-dir`` and ``hydra.searchpath`` of a command add.

    Raises UserError for a folder or a package that is not there.
    """
    given = {} if config_dir is None else {config_dir: "--config-dir"}
    parser = OverridesParser.create()
    for word in overrides:
        if word.startswith(_SEARCHPATH):
            given |= dict.fromkeys(_listed(word, parser), _SEARCHPATH)
    folders = []
    for place, key in given.items():
        scheme, separator, rest = place.rpartition("://")
        if scheme == "pkg":
            try:
                folder = Path(str(resources.files(rest.replace("/", "."))))
            except ModuleNotFoundError as error:
                found = f"{key.rstrip('=')} names the package {rest}, which is not installed"
                raise UserError(found, "install it, or leave it out.") from error
        elif not separator or scheme == "file":
            folder = Path(rest)
        else:
            continue
        if not folder.is_dir():
            raise UserError(
                f"{key.rstrip('=')} names {place}, which is no folder", "give one that is there."
            )
        folders.append(folder)
    return folders


def _listed(word: str, parser: OverridesParser) -> list[str]:
    """Return what a word ``hydra.searchpath=`` lists. UserError where a place must be quoted."""
    try:
        value = parser.parse_override(word).value()
    except HydraException as error:
        inner = word.partition("=")[2].strip("[]").split(",")
        places = [each.strip(" '\"") for each in inner]
        cure = typed(_SEARCHPATH.rstrip("="), places)
        raise UserError(f"{word} must be quoted", cure) from error
    named = value if isinstance(value, list) else [value]
    return [str(getattr(each, "text", each)) for each in named]


class ExperimentSource(FileConfigSource):
    """A folder of experiments, seen by Hydra as the config group ``experiment``."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme that a search path entry names this source by."""
        return "experiments"

    def load_config(self, config_path: str) -> ConfigResult:
        """Load ``experiment/NAME`` from ``NAME.yaml``."""
        return super().load_config(_inside(config_path) or "absent")

    def is_config(self, config_path: str) -> bool:
        """Say whether there is an experiment of this name."""
        inside = _inside(config_path)
        return bool(inside) and super().is_config(inside or "")

    def is_group(self, config_path: str) -> bool:
        """Say whether this is the group ``experiment``, or the place where it lies."""
        return config_path in ("", GROUP)

    def available(self) -> bool:
        """Say whether the folder exists."""
        return super().available()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List the experiments, or the group itself."""
        if config_path == GROUP and results_filter in (None, ObjectType.CONFIG):
            return sorted(file.stem for file in Path(self.path).glob("*.yaml"))
        if config_path == "" and results_filter in (None, ObjectType.GROUP):
            return [GROUP]
        return []


def _inside(config_path: str) -> str | None:
    head, _, tail = config_path.partition("/")
    return tail if head == GROUP and tail else None


class CudaSource(ConfigSource):
    """Makes ``device_map=cuda:3`` an option for every N."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme that a search path entry names this source by."""
        return "cuda"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the device map of one GPU."""
        match = _CUDA.match(config_path)
        if match is None:
            raise ConfigLoadError(f"no such config: {config_path}")
        node = OmegaConf.create({"strategy": match[1]})
        return ConfigResult(
            config=node, path=self.path, provider=self.provider, header={"package": None}
        )

    def available(self) -> bool:
        """Say that the source is there: it needs no folder."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Say whether options of this group come from here."""
        return config_path == "device_map"

    def is_config(self, config_path: str) -> bool:
        """Say whether this is ``device_map/cuda:N``."""
        return _CUDA.match(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List nothing: there is no end of N."""
        return []


class LayerparitySearchPath(SearchPathPlugin):
    """Adds the sources above to every composition."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the experiment folders and the GPU devices."""
        for folder in experiment_folders():
            search_path.append("layerparity", f"experiments://{folder}")
        search_path.append("layerparity", "cuda://")


def register() -> None:
    """Make Hydra know the sources, once in a process."""
    plugins = Plugins.instance()
    for plugin in (ExperimentSource, CudaSource, LayerparitySearchPath):
        plugins.register(plugin)
