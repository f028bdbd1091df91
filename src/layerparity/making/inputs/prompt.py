"""inputs=prompt: text through the checkpoint's own tokenizer, as one batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.parse import parse_json
from layerparity.making.inputs import _chat
from layerparity.making.inputs.golden import golden_command
from layerparity.making.request.inputs import Inputs, Request, batch, check_length
from layerparity.model.tokenizer import load_tokenizer, tokenizer_errors

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
            f"make a golden run first ({golden_command(request)}) and use inputs=golden."
        )
    texts = prompts(request)
    tokenizer = load_tokenizer(request.model_folder)
    chat = request.config.prompt.chat
    if chat and not tokenizer.chat_template:
        raise UserError("This tokenizer has no chat template: use prompt.chat=false.")
    whole = _chat.dress(tokenizer, texts, request.model_folder) if chat else texts
    with tokenizer_errors(request.model_folder):
        # A template holds the special tokens already.
        rows = [list(tokenizer(each, add_special_tokens=not chat)["input_ids"]) for each in whole]
    check_length(rows, request, "The prompt")
    request.refuse_large(len(rows), request.config.seq_len or max(map(len, rows)))
    pad = tokenizer.pad_token_id
    inputs = batch(rows, request.config.seq_len, pad if isinstance(pad, int) else 0)
    inputs.source, inputs.texts = "prompt", texts
    inputs.chosen = f"prompt {texts[0][:60]!r}" + (f" and {len(texts) - 1} more" * (len(texts) > 1))
    return inputs


def prompts(request: Request) -> list[str]:
    """Return the texts asked for, or the default prompt where none was given."""
    prompt = request.config.prompt
    if len(prompt.given) > 1:
        raise UserError("Give one of prompt.text, prompt.file and prompt.texts, not several.")
    if prompt.file is not None:
        return _from_file(Path(prompt.file))
    if prompt.texts:
        return list(prompt.texts)
    if prompt.text is not None:
        return [prompt.text]
    return [request.config.model.prompt or DEFAULT_PROMPT]


def _from_file(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt.file={path} cannot be read as text ({error}).") from error
    if path.suffix != ".json":
        return [text.rstrip("\n")]
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UserError(f"prompt.file={path} is not JSON ({error})", "mend it.") from error
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise UserError(f"prompt.file={path} should hold a JSON list of texts.")
    return value
