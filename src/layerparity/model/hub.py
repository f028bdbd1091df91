"""Find a model of the Hugging Face hub in its cache on this machine; fetch it where that is asked.

The hub's own library knows where the cache is (HF_HOME, HF_HUB_CACHE), how it is laid out, and what
a token is. Nothing is fetched without ``model.download=true``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    from layerparity.settings.model import ModelSettings

CONFIG = "config.json"
# All that a run reads beside weights: sizes, the index, the tokenizer, a chat template.
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")


def cached(model: ModelSettings) -> Path:
    """Return the folder of a model of the hub as it lies in the cache, or is fetched into it.

    Where it is fetched, these are its small files; `fetch` brings weights. Raises UserError where
    it is not here and is not to be fetched, and where the hub has no such model or refuses it.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    name = model.hub_id
    assert name is not None
    found = _checked(
        model, lambda: try_to_load_from_cache(name, _within(model, CONFIG), revision=model.revision)
    )
    if isinstance(found, str) and not model.download:
        return Path(found).parent
    if not model.download:
        revision = f" revision {model.revision} of" if model.revision else ""
        raise UserError(
            f"model.path={name} is no folder here, and{revision} {name} is not in the hub's cache "
            f"({HF_HUB_CACHE})",
            f"add model.download=true, or type '{command(model)}', or give the model's folder.",
        )
    try:
        folder = fetch(model, _SMALL)
    except UserError:
        if not isinstance(found, str):
            raise
        # What is here may be all that is needed; what is not is asked for again.
        return Path(found).parent
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{name} holds no {_within(model, CONFIG)}",
            "give a model of transformers, and in model.subfolder the folder that it lies in.",
        )
    return folder


def fetch(model: ModelSettings, patterns: Sequence[str]) -> Path:
    """Fetch what has one of these names, with a bar of progress; return the model's folder."""
    from huggingface_hub import snapshot_download

    wanted = [_within(model, pattern) for pattern in patterns]
    # A pattern's star reaches into folders, where other formats of the same weights often lie.
    unwanted = [] if model.subfolder else ["*/*"]
    folder = _checked(
        model,
        lambda: snapshot_download(
            str(model.hub_id),
            revision=model.revision,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
        ),
    )
    return Path(folder) / _within(model, "")


def command(model: ModelSettings) -> str:
    """Return the command of the hub's own program that fetches a model."""
    revision = f" --revision {model.revision}" if model.revision else ""
    return f"hf download {model.hub_id}{revision}"


def _within(model: ModelSettings, name: str) -> str:
    """Return the path of a file within a model. Raises UserError for a folder outside of it."""
    folder = (model.subfolder or "").strip("/")
    if ".." in folder.split("/"):
        raise UserError(f"model.subfolder={folder} leads out of the model", "leave '..' out.")
    return f"{folder}/{name}" if folder else name


def _checked(model: ModelSettings, asked: Callable[[], Any]) -> Any:
    """Return what the hub's library answers. Raises UserError for what it raises, with the cure."""
    from huggingface_hub import errors

    name = model.hub_id
    try:
        return asked()
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} wants its licence accepted, and the hub does not let you read it",
            "accept it on the model's page, and log in with 'hf auth login', or set HF_TOKEN.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{name} has no revision {model.revision} on the hub", "give another model.revision."
        ) from error
    except errors.RepositoryNotFoundError as error:
        said = f"the hub has no model {name}, or it is private and not for you to read"
        cure = "check model.path; of a private one, log in with 'hf auth login', or set HF_TOKEN."
        raise UserError(said, cure) from error
    except errors.HFValidationError as error:
        said = f"model.path={name} is no folder here, and no name of a model on the hub either"
        raise UserError(said, "give a folder, or ORGANISATION/NAME.") from error
    except UnicodeDecodeError as error:
        # What stands in refs/ is read as the name of a commit.
        said = f"what the hub's cache says of the revisions of {name} is damaged ({error.reason})"
        cure = "remove refs/ of the model's folder in the cache, and fetch it again."
        raise UserError(said, cure) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise _unreachable(model) from error
    except (errors.HfHubHTTPError, errors.HTTPError, OSError, json.JSONDecodeError) as error:
        raise _unreachable(model, " ".join(str(error).split())[:200]) from error


def _unreachable(model: ModelSettings, said: str = "") -> UserError:
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    why = f"the hub at {ENDPOINT} cannot be reached"
    if HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE=1 forbids to ask the hub"
    return UserError(
        f"{model.hub_id} cannot be fetched: {why}{f' ({said})' if said else ''}",
        f"type '{command(model)}' where there is a network, and give model.path=FOLDER.",
    )
