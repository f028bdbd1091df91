"""RunFolder: the folder of one run. Each of its files has its name, its writer and its reader here.

References have their own, in `record.references`. A run in a store, an exported one and an imported
one are the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.ground.decode import decode, encode, json_lines
from layerparity.ground.errors import UserError
from layerparity.ground.files import (
    RUN_AGAIN,
    damaged,
    inside,
    read_tensor,
    read_tensors,
    reading,
    tensor_digest,
    text_digest,
    whole_file,
    write_text,
    writing,
)
from layerparity.ground.parse import parse_json, parse_yaml
from layerparity.ground.profile import RunProfile
from layerparity.ground.secrets import redacted
from layerparity.record.loaded import PortLoads
from layerparity.record.manifest import (
    Manifest,
    Record,
    WeightPrint,
    parsed_manifest,
)

if TYPE_CHECKING:
    import torch
    import yaml

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
INPUTS = "inputs.safetensors"
PROMPTS = "prompts.json"
USED_WEIGHTS = "weights.json"
EFFECTIVE_WEIGHTS = "effective_weights.json"
PROFILE = "profile.json"
LOADED = "loaded.json"
NEW_TEXTS = "generated.json"
WARNINGS = "warnings.txt"
_TENSORS = "tensors"
_REFERENCES = "reference"
REFERENCE_INDEX = f"{_REFERENCES}/index.json"
REFERENCE_STATES = f"{_REFERENCES}/states.safetensors"
_MASK, _TOKENS = "attention_mask", "token_ids"
_NO_TIME = "the report leaves out where this run's time went; make the run again to see it"

UsedWeights = dict[str, dict[str, str]]
EffectiveWeights = dict[str, dict[str, WeightPrint]]


def stage_file(stage: str) -> str:
    """Return the file of a stage's tensors (``decode.N`` for a decode step's), in the folder."""
    return f"{_TENSORS}/{stage}.safetensors"


def reference_file(stage: str, feed: str) -> str:
    """Return the file of a stage's references under one feed, in the folder."""
    return f"{_REFERENCES}/{stage}.{feed}.safetensors"


class RunFolder:
    """The folder of one run.

    A file appears whole or not at all, and the manifest last; it lists the hashes of the others.
    Writers raise UserError where the disk refuses, readers where a file is missing, damaged or
    not the one that was written.
    """

    def __init__(
        self,
        where: Path | Callable[[str], Path],
        locate_tensor: Callable[[str, str], Path] | None = None,
    ) -> None:
        """``where`` is the folder, or returns where a file of it lies, and for "" the folder.

        ``locate_tensor`` returns a file that holds a tensor, given its file's name and its own.
        """
        self.locate = where.joinpath if isinstance(where, Path) else where
        self._locate_tensor = locate_tensor
        self._written: dict[str, str] = {}
        self._read: Manifest | None = None

    @property
    def path(self) -> Path:
        """The folder; from a server all of it is fetched."""
        return self.locate("")

    @property
    def is_run(self) -> bool:
        """Whether a run finished here."""
        return self.locate(MANIFEST).is_file()

    def write_manifest(self, manifest: Manifest) -> str:
        """Write the manifest, which makes the folder a finished run; return its hash.

        It lists the files of text that this very object wrote.
        """
        self._read = None
        listed = {**encode(manifest), "files": self._written}
        return self.write_text(MANIFEST, json_lines(listed))

    def read_manifest(self, digest: str | None = None) -> Manifest:
        """Return the manifest, which must have this hash where one is given."""
        path = self.locate_file(MANIFEST)
        if not path.is_file():
            raise UserError(
                f"No {MANIFEST} in {path.parent}: the run did not finish; run it again."
            )
        with reading(path):
            text = path.read_text(encoding="utf-8")
            if digest is not None and text_digest(text) != digest:
                raise damaged(path, "it is not the one that the run wrote")
            self._read = parsed_manifest(path, text)
        return self._read

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration, plain values, as YAML that OmegaConf reads, too."""
        self.write_text(CONFIG, _yaml_of(config))

    def read_config(self) -> dict[str, Any]:
        """Return the configuration that the run was made with; empty where it is not kept."""
        text = self._read_text(CONFIG)
        if text is None:
            return {}
        with reading(self.locate(CONFIG)):
            config: dict[str, Any] = decode(dict[str, Any], parse_yaml(text))
            return config

    def write_inputs(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write token ids, attention mask and position ids, int64 [batch, token], by name."""
        self.write_tensors(INPUTS, tensors)

    def read_inputs(self, hashes: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the inputs, int64 [batch, token], by the names the manifest lists with hashes."""
        path = self.locate_file(INPUTS)
        tensors = read_tensors(path, hashes)
        for name, tensor in tensors.items():
            refuse_altered(tensor, hashes[name], name, path)
        return tensors

    def read_mask(self) -> torch.Tensor | None:
        """Return the attention mask as bool [batch, token], true at real tokens; None for none."""
        listed = self._manifest.inputs if self.is_run else {}
        # All of them: where a token was changed, the mask is not to be believed either.
        return self.read_inputs(listed)[_MASK].bool() if _MASK in listed else None

    def read_token_ids(self) -> torch.Tensor | None:
        """Return the prompt's tokens, int64 [batch, token]; None for none."""
        listed = self._manifest.inputs if self.is_run else {}
        return self.read_inputs(listed)[_TOKENS] if _TOKENS in listed else None

    def write_prompts(self, texts: Sequence[str]) -> None:
        """Write the prompts, one a row of the batch."""
        self.write_text(PROMPTS, json.dumps(list(texts), ensure_ascii=False))

    def read_prompts(self) -> list[str]:
        """Return the prompts; empty where the run had none."""
        texts: list[str] | None = self._read_json(PROMPTS, list[str])
        return texts or []

    def write_used_weights(self, used: Mapping[str, Mapping[str, str]]) -> None:
        """Write the hashes of the checkpoint's tensors that each stage used, by stage and name."""
        self.write_text(USED_WEIGHTS, json_lines(used))

    def read_used_weights(self) -> UsedWeights:
        """Return the hashes of the checkpoint's tensors, by stage and name; empty where unknown."""
        used: UsedWeights | None = self._read_json(USED_WEIGHTS, UsedWeights)
        return used or {}

    def write_effective_weights(self, prints: Mapping[str, Mapping[str, WeightPrint]]) -> None:
        """Write the prints of the weights that each stage's graph held, by stage and name."""
        self.write_text(EFFECTIVE_WEIGHTS, json.dumps(encode(prints)))

    def read_effective_weights(self) -> EffectiveWeights:
        """Return the prints of the weights, by stage and name; empty where the run does not say."""
        prints: EffectiveWeights = self._read_json(EFFECTIVE_WEIGHTS, EffectiveWeights) or {}
        for named in prints.values():
            for name, each in named.items():
                if not each.is_whole:
                    raise damaged(self.locate(EFFECTIVE_WEIGHTS), f"{name} lacks statistics")
        return prints

    def write_profile(self, profile: RunProfile) -> None:
        """Write where the run's time and memory went."""
        self.write_text(PROFILE, json_lines(encode(profile)))

    def read_profile(self) -> RunProfile | None:
        """Return where the run's time and memory went; None where it is not kept."""
        text = self._read_text(PROFILE, _NO_TIME)
        if text is None:
            return None
        with reading(self.locate(PROFILE), _NO_TIME):
            return RunProfile.from_dict(parse_json(text))

    def write_loaded(self, loaded: PortLoads) -> None:
        """Write what the run's port loaded."""
        self.write_text(LOADED, json_lines(encode(loaded)))

    def read_loaded(self) -> PortLoads | None:
        """Return what the run's port loaded; None where it is not kept."""
        loaded: PortLoads | None = self._read_json(LOADED, PortLoads)
        return loaded

    def write_new_texts(self, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Write what the run generated, one text a row of the batch, for people to read."""
        pairs = [{"prompt": p, "generated": t} for p, t in zip(prompts, texts, strict=True)]
        self.write_text(NEW_TEXTS, json.dumps(pairs, indent=1, ensure_ascii=False))

    def read_new_texts(self) -> list[str]:
        """Return the prompts with what the run generated after each; empty where it has none."""
        pairs: list[dict[str, str]] | None = self._read_json(NEW_TEXTS, list[dict[str, str]])
        return [f"{pair.get('prompt', '')}|{pair.get('generated', '')}" for pair in pairs or ()]

    def write_warnings(self, lines: Sequence[str]) -> None:
        """Write what the backend warned of, for people to read."""
        self.write_text(WARNINGS, "\n".join(lines) + "\n")

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a file of tensors of any shape and dtype by name, such as `stage_file`."""
        import torch
        from safetensors import numpy
        from safetensors.torch import save_file

        path, plain = self.path / name, (torch.float32, torch.float64, torch.int64)
        whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        with writing(path), whole_file(path) as part:
            if all(tensor.dtype in plain for tensor in whole.values()):
                # The same bytes, in a third of the time where there are many small ones.
                numpy.save_file({key: tensor.numpy() for key, tensor in whole.items()}, part)
            else:
                save_file(whole, part)

    def read_tensor(self, record: Record) -> torch.Tensor:
        """Return a site's tensor in the record's shape and dtype, mapped from its file.

        Its bytes are checked against the manifest.
        """
        path = self.locate_tensor(record.file, str(record.site))
        return checked_tensor(record, path, read_tensor(path, str(record.site)))

    def locate_file(self, name: str) -> Path:
        """Return where a file lies. Raises UserError for a link that leads out of the folder."""
        path = self.locate(name)
        return inside(path.parents[name.count("/")], name)

    def refuse_outside(self, file: str) -> None:
        """Raise UserError for a file's name, or a link, that leads out of the folder."""
        # Of a folder elsewhere there is only a name: no link of ours can be there.
        inside(self.path if self._locate_tensor is None else Path("run"), file)

    def locate_tensor(self, file: str, name: str) -> Path:
        """Return a file that holds a tensor; from a server no more is fetched than it needs.

        Raises UserError for a link that leads out of the folder.
        """
        if self._locate_tensor is not None:
            self.refuse_outside(file)
            return self._locate_tensor(file, name)
        return inside(self.path, file)

    def write_text(self, name: str, text: str) -> str:
        """Write a file of text, without the logins of addresses; return its hash."""
        path, text = self.path / name, redacted(text)
        with writing(path):
            write_text(path, text)
        self._written[name] = text_digest(text)
        return self._written[name]

    @property
    def _manifest(self) -> Manifest:
        return self._read or self.read_manifest()

    def _read_json(self, name: str, kind: Any) -> Any:
        """Return a file of JSON as a type; None where the run kept none."""
        text = self._read_text(name)
        if text is None:
            return None
        with reading(self.locate(name)):
            return decode(kind, parse_json(text))

    def _read_text(self, name: str, cure: str = RUN_AGAIN) -> str | None:
        """Return a file of text, held against its hash; None where the run kept none."""
        path = self.locate_file(name)
        # Before schema 4 nothing was listed.
        listed = self._manifest.files.get(name) if self.is_run else None
        if listed is None and not path.is_file():
            return None
        with reading(path, cure):
            text = path.read_text(encoding="utf-8")
        if listed is not None and text_digest(text) != listed:
            raise damaged(path, "it is not the one that the run wrote", cure)
        return text


def checked_tensor(record: Record, path: Path, tensor: torch.Tensor) -> torch.Tensor:
    """Return a site's tensor, which was read from ``path``, in the record's shape and dtype.

    Raises UserError where shape, dtype or bytes are not those that the manifest lists.
    """
    if tuple(tensor.shape) != record.shape or str(tensor.dtype) != f"torch.{record.dtype}":
        raise damaged(path, f"{record.site} is not of the shape and type the manifest lists")
    refuse_altered(tensor, record.digest, str(record.site), path)
    return tensor


def refuse_altered(tensor: torch.Tensor, digest: str, name: str, path: Path) -> None:
    """Raise UserError unless a tensor's bytes have this hash."""
    if tensor_digest(tensor) != digest:
        raise damaged(path, f"{name}: its bytes are not those the manifest lists")


def _yaml_of(values: Mapping[str, Any]) -> str:
    """Return what `OmegaConf.to_yaml` makes of plain values, in a tenth of its time.

    Raises yaml.representer.RepresenterError for what is no plain value.
    """
    import yaml

    return str(
        yaml.dump(
            dict(values),
            default_flow_style=False,
            allow_unicode=True,
            sort_keys=False,
            Dumper=_plain_dumper(),
        )
    )


@cache
def _plain_dumper() -> type[yaml.SafeDumper]:
    import yaml
    from omegaconf._utils import OmegaConfDumper

    # libyaml's, where PyYAML was built with it.
    class PlainDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Quotes a text that one of the two readers would take for a number or a truth value."""

    PlainDumper.add_representer(str, OmegaConfDumper.str_representer)
    return PlainDumper
