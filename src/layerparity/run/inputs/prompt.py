"""inputs=prompt: text through the checkpoint's own tokenizer, as one batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.run.inputs.base import Inputs, Request, batch, check_length

DEFAULT_PROMPT = "The first machine asked the second one a question, and the answer was"


@dataclass
class Settings:
    """conf/inputs/prompt.yaml."""

    name: str = "prompt"


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return the tokenised prompts, int64 [batch, token].

    Raises UserError where the scope does not begin with tokens.
    """
    if not request.from_tokens:
        raise UserError(
            f"A prompt can only feed a scope that begins at layer 0, not {request.stages[0]}: "
            "make a golden run first (python run.py backend=gpu scope=full) and use inputs=golden."
        )
    texts = prompts(request)
    tokenizer = load_tokenizer(request.model_folder)
    chat = request.config.prompt.chat
    if chat and not tokenizer.chat_template:
        raise UserError("This tokenizer has no chat template: use prompt.chat=false.")
    rows = []
    for text in texts:
        whole = text
        if chat:
            turn = [{"role": "user", "content": text}]
            whole = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        # A template holds the special tokens already.
        rows.append(list(tokenizer(whole, add_special_tokens=not chat)["input_ids"]))
    check_length(rows, request, "The prompt")
    pad = tokenizer.pad_token_id
    inputs = batch(rows, request.config.seq_len, pad if pad is not None else 0)
    inputs.source, inputs.texts = "prompt", texts
    inputs.chosen = f"prompt {texts[0][:60]!r}" + (f" and {len(texts) - 1} more" * (len(texts) > 1))
    return inputs


def prompts(request: Request) -> list[str]:
    """Return the texts asked for, or the default prompt where none was given."""
    prompt = request.config.prompt
    given = [prompt.text is not None, prompt.file is not None, bool(prompt.texts)]
    if sum(given) > 1:
        raise UserError("Give one of prompt.text, prompt.file and prompt.texts, not several.")
    if prompt.file is not None:
        return _from_file(Path(prompt.file))
    if prompt.texts:
        return list(prompt.texts)
    if prompt.text is not None:
        return [prompt.text]
    return [request.config.model.prompt or DEFAULT_PROMPT]


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer. Raises UserError where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} has no tokenizer that can be read: use inputs=tokens inputs.file=<ids.json>."
        ) from error


def _from_file(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt.file={path} cannot be read as text ({error}).") from error
    if path.suffix != ".json":
        return [text.rstrip("\n")]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"prompt.file={path} is not JSON ({error}).") from error
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise UserError(f"prompt.file={path} should hold a JSON list of texts.")
    return value
