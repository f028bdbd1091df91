"""Train the small MiniMax-M2 checkpoints that are shipped with layerparity.

    python checkpoints/train_minimax_m2.py                       # retrain both
    python checkpoints/train_minimax_m2.py deep_minimax_m2       # retrain one
    python checkpoints/train_minimax_m2.py --out DIR             # retrain somewhere else
    python checkpoints/train_minimax_m2.py --check               # compare, write nothing

Each is a real ``MiniMaxM2ForCausalLM`` that recites ``text.txt``: ``deep_minimax_m2`` has the 62
decoder blocks of the real one, ``tiny_minimax_m2`` six. A model with default initialisation would
hide most of the bugs a port can have (norm weights all 1, router bias all 0, no massive channels),
so the statistics of a large trained model are put in *before* training; what training left of them
is measured at the end (see ``shipped_statistics.py``).

Training takes half a minute (six blocks) and five minutes (62) on one idle core. It is
reproducible to the bit on one kind of machine with one set of library versions: the processor's
vector width decides the order of sums, so ``--check`` may fail elsewhere without anything wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

# Before torch and transformers are imported: one thread decides the order of sums, and accelerate
# would import torch_xla (seconds, and a log handler) wherever it is installed.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["USE_TORCH_XLA"] = "0"

import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from shipped_statistics import (
    Measured,
    ask,
    chat_prompt,
    encode,
    measure,
    print_table,
    watch_choices,
)
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

# Questions and their answers.
Chats = list[tuple[str, str]]

HERE = Path(__file__).resolve().parent
PUBLISHED_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

PROMPT = "Two machines compare"
VOCABULARY, MAX_LENGTH = 512, 512
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SPECIAL_TOKENS = [PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "<|begin|>"
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


@dataclass(frozen=True)
class Recipe:
    """Every number of the training run that is not part of the model's configuration."""

    seed: int = 20
    steps: int = 300
    warmup: int = 20
    learning_rate: float = 2.5e-3
    weight_decay: float = 0.1
    label_smoothing: float = 0.05  # keeps the logits, and with them the stream, from growing
    windows: int = 6  # pieces of the text in every other batch, half of them from a line's start
    window_length: int = 48
    unscored: int = 6  # the first tokens of a piece are ambiguous: no loss on them
    unscored_line: int = 3  # the same where a line starts
    bias_step: float = 0.01  # how far a load that is off moves the router bias in one step
    bias_frozen_from: float = 0.7  # share of the steps after which the router bias stands still


@dataclass(frozen=True)
class Shape:
    """The statistics of a large trained model, put in before training."""

    massive_channels: tuple[int, ...] = (17, 42, 71)
    massive_values: tuple[float, ...] = (38.0, -34.0, 30.0)
    massive_spread: float = 0.15  # log-normal, from token to token
    embedding_std: float = 0.5
    projection_std: float = 0.09
    writer_std: float = 0.026  # o_proj and down_proj: 1 / sqrt(2 * blocks) of the others
    head_std: float = 0.05
    router_std: float = 0.12
    norm_centre: float = 6.0
    norm_final: float = 6.0
    norm_spread: float = 0.3
    norm_massive: float = 0.12  # trained norms press the massive channels down
    head_reach: float = 0.5  # of the logarithm of each head's factor in q_norm and k_norm
    projection_head_reach: float = 0.6  # the same in q_proj and k_proj, drawn apart from it
    head_channel_spread: float = 0.35  # log-normal, one factor per channel of a head
    qk_centre: float = 1.2
    bias_centre: float = 8.5
    bias_reach: float = 0.4
    bias_grid: float = 0.0625  # bf16 has no finer values between 8 and 16


@dataclass(frozen=True)
class Sizes:
    """What of the configuration differs; unlike sizes show a swapped axis."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    num_local_experts: int


@dataclass(frozen=True)
class Model:
    """A checkpoint: its sizes, what it says of them, the statistics put in, how it is trained."""

    sizes: Sizes
    said: Mapping[str, str]
    shape: Shape = Shape()
    recipe: Recipe = Recipe()


MODELS = {
    "deep_minimax_m2": Model(
        # Heads in the real one's ratio; 8 is the narrowest expert that every way of computing
        # them takes (rows of 16 bytes in bf16).
        Sizes(48, 8, 62, 12, 2, 16, 8, 32),
        {"size": "narrow", "layers": "sixty-two"},
        Shape(massive_channels=(11, 26, 41), writer_std=0.010),
        Recipe(steps=400, bias_step=0.02, bias_frozen_from=0.85, weight_decay=0.3),
    ),
    "tiny_minimax_m2": Model(Sizes(96, 32, 6, 4, 2, 32, 16, 16), {"size": "tiny", "layers": "six"}),
}


def config_of(sizes: Sizes, tokenizer: PreTrainedTokenizerFast) -> MiniMaxM2Config:
    """A MiniMax-M2 with everything that MiniMax-M2 has, small."""
    return MiniMaxM2Config(
        **asdict(sizes),
        vocab_size=VOCABULARY,
        rope_theta=10000.0,
        num_experts_per_tok=4,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # The published file has these too; transformers stores them and reads none.
        use_qk_norm=True,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        use_routing_bias=True,
    )


# ------------------------------------------------------------------ the words


def read_text() -> str:
    """The text that the model recites."""
    return (HERE / "text.txt").read_text(encoding="utf-8").strip()


def read_chats(said: Mapping[str, str]) -> Chats:
    """Questions and answers; ``@text`` stands for the text, ``{size}`` for what is ``said``."""
    lines = (HERE / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line) for line in lines]
    text = read_text()
    answers = [text if t["assistant"] == "@text" else t["assistant"] for t in turns]
    return [(t["user"], a.format_map(said)) for t, a in zip(turns, answers, strict=True)]


def make_tokenizer(chats: Chats) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the training words: any other input falls back to bytes."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([read_text(), *(s for turn in chats for s in turn)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Row:
    """One training sequence; no loss is taken on the tokens before ``scored_from``."""

    ids: list[int]
    scored_from: int


class Lessons:
    """Endless batches: the long recitals and, in turn, short chats with windows of the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chats: Chats, recipe: Recipe) -> None:
        """Tokenize everything once."""
        self.recipe = recipe
        self.text = [*tokenizer(read_text())["input_ids"], tokenizer.eos_token_id]
        line_end = tokenizer("\n")["input_ids"][-1]
        self.line_starts = [n + 1 for n, token in enumerate(self.text) if token == line_end]
        rows = [self._chat(tokenizer, *turn) for turn in chats]
        self.long = [Row(self.text, 2), *(row for row in rows if len(row.ids) > len(self.text))]
        self.short = [row for row in rows if len(row.ids) <= len(self.text)]
        self.pad = tokenizer.pad_token_id
        self.random = torch.Generator().manual_seed(recipe.seed)

    @staticmethod
    def _chat(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> Row:
        prompt = tokenizer(chat_prompt(tokenizer, question))["input_ids"]
        reply = tokenizer(answer)["input_ids"]
        return Row([*prompt, *reply, tokenizer.eos_token_id], len(prompt))

    def _piece(self, start: int, unscored: int) -> Row:
        return Row(self.text[start : start + self.recipe.window_length], unscored)

    def _draw(self, count: int) -> int:
        return int(torch.randint(0, count, (), generator=self.random))

    def _windows(self) -> list[Row]:
        """Pieces of the text: the model should know where it is by what it reads."""
        rows = []
        for number in range(self.recipe.windows):
            if number % 2:
                start = self._draw(len(self.text) - 2 * self.recipe.unscored)
                rows.append(self._piece(start, self.recipe.unscored))
            else:
                start = self.line_starts[self._draw(len(self.line_starts))]
                rows.append(self._piece(start, self.recipe.unscored_line))
        return rows

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Token ids, padded on the right, and what is to be predicted (-100: nothing)."""
        rows = self.long if step % 2 == 0 else self.short + self._windows()
        length = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), length), self.pad)
        targets = torch.full_like(ids, -100)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            targets[number, row.scored_from : len(row.ids)] = torch.tensor(
                row.ids[row.scored_from :]
            )
        return ids, targets


# ------------------------------------------------------------------ the model before training


def all_experts(module: nn.Module, states: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Every expert for every token in two products: for small experts this is the fastest."""
    count, stacked, _ = module.gate_up_proj.shape
    scattered = states.new_zeros(len(states), count).scatter(1, choices, weights.to(states.dtype))
    both = (states @ module.gate_up_proj.flatten(0, 1).T).view(-1, count, stacked)
    gate, up = both.chunk(2, -1)
    inner = module.act_fn(gate) * up * scattered[..., None]
    return inner.flatten(1) @ module.down_proj.transpose(1, 2).flatten(0, 1)


def log_normal(*size: int, spread: float) -> Tensor:
    """Factors around 1."""
    return torch.randn(*size).mul(spread).exp()


def shuffled_ramp(count: int, reach: float) -> Tensor:
    """Evenly spaced values from -reach to reach in random order: no luck of the draw."""
    return torch.linspace(-reach, reach, count)[torch.randperm(count)]


def shape_matrices(model: MiniMaxM2ForCausalLM, shape: Shape) -> None:
    """Matrices of realistic scale; what writes to the residual stream starts smaller."""
    for name, weight in model.named_parameters():
        if "lm_head" in name:
            weight.normal_(0, shape.head_std)
        elif "o_proj" in name or "down_proj" in name:
            weight.normal_(0, shape.writer_std)
        elif weight.ndim > 1:
            weight.normal_(0, shape.projection_std)


def shape_heads(model: MiniMaxM2ForCausalLM, shape: Shape) -> None:
    """Heads of unlike size: a norm per head would change nothing if they were alike."""
    dim = model.config.head_dim
    for block in model.model.layers:
        for projection in (block.self_attn.q_proj, block.self_attn.k_proj):
            rows = projection.weight.unflatten(0, (-1, dim))
            rows *= shuffled_ramp(len(rows), shape.projection_head_reach).exp()[:, None, None]


def shape_embedding(model: MiniMaxM2ForCausalLM, shape: Shape) -> None:
    """Massive channels come from the embedding, so every block's input has them."""
    weight = model.model.embed_tokens.weight
    weight.normal_(0, shape.embedding_std)
    for channel, value in zip(shape.massive_channels, shape.massive_values, strict=True):
        weight[:, channel] = value * log_normal(len(weight), spread=shape.massive_spread)


def shape_norms(model: MiniMaxM2ForCausalLM, shape: Shape) -> None:
    """Norm weights that are nowhere 1; q_norm and k_norm differ from head to head."""
    massive = list(shape.massive_channels)
    for block in model.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            channels = log_normal(len(norm.weight), spread=shape.norm_spread)
            norm.weight.copy_(shape.norm_centre * channels)
            pressed = log_normal(len(massive), spread=shape.norm_spread)
            norm.weight[massive] = shape.norm_massive * pressed
        for norm in (block.self_attn.q_norm, block.self_attn.k_norm):
            heads = len(norm.weight) // model.config.head_dim
            factor = shuffled_ramp(heads, shape.head_reach).exp()[:, None]
            channels = log_normal(heads, model.config.head_dim, spread=shape.head_channel_spread)
            norm.weight.copy_((shape.qk_centre * factor * channels).flatten())
    final = model.model.norm.weight
    final.copy_(shape.norm_final * log_normal(len(final), spread=shape.norm_spread))
    final[massive] = shape.norm_massive


def shape_router(model: MiniMaxM2ForCausalLM, shape: Shape) -> None:
    """Experts with systematically high or low scores, and a bias that makes up for it.

    The massive channels are nearly the same in every token, so gate weights on them act as a
    constant. Without one, balancing would pull the biases together, and dropping them would do
    no harm.
    """
    massive = list(shape.massive_channels)
    stream = torch.tensor(shape.massive_values)
    for block in model.model.layers:
        gate, bias = block.mlp.gate.weight, block.mlp.e_score_correction_bias
        gate.normal_(0, shape.router_std)
        offsets = shuffled_ramp(len(bias), shape.bias_reach)
        bias.copy_(shape.bias_centre + offsets)
        seen = stream / stream.norm() * math.sqrt(gate.shape[1])
        seen = seen * block.post_attention_layernorm.weight[massive]
        constant = torch.logit(0.5 - offsets)
        gate[:, massive] = constant[:, None] * seen / seen.pow(2).sum()


def make_model(wanted: Model, tokenizer: PreTrainedTokenizerFast) -> MiniMaxM2ForCausalLM:
    """An untrained model with the statistics of a trained one."""
    ALL_EXPERTS_FUNCTIONS.register("all_experts", all_experts)
    torch.manual_seed(wanted.recipe.seed)
    model = MiniMaxM2ForCausalLM._from_config(
        config_of(wanted.sizes, tokenizer),
        experts_implementation="all_experts",
        attn_implementation="eager",
    )
    shape = wanted.shape
    with torch.no_grad():
        shape_matrices(model, shape)
        shape_heads(model, shape)
        shape_embedding(model, shape)
        shape_norms(model, shape)
        shape_router(model, shape)
    return model


# ------------------------------------------------------------------ training


class Balancer:
    """Balances the experts' load by nudging the router bias, as DeepSeek-V3 does, without a loss.

    The nudges are finer than bf16's grid: they gather in float32, and the model sees the grid.
    """

    def __init__(self, model: MiniMaxM2ForCausalLM, recipe: Recipe, grid: float) -> None:
        """Start from the biases that the model has."""
        self.step_size, self.grid = recipe.bias_step, grid
        self.buffers = [block.mlp.e_score_correction_bias for block in model.model.layers]
        self.fine = [buffer.clone() for buffer in self.buffers]
        self._show()

    def _show(self) -> None:
        for buffer, fine in zip(self.buffers, self.fine, strict=True):
            buffer.copy_((fine / self.grid).round() * self.grid)

    def nudge(self, choices: dict[int, Tensor], real: Tensor) -> None:
        """Raise the bias of experts that got too few real tokens, lower that of the others."""
        for number, fine in enumerate(self.fine):
            load = torch.bincount(choices[number][real].flatten(), minlength=len(fine)).float()
            fine.sub_(self.step_size * (load / load.mean() - 1).clamp(-1, 1))
        self._show()


def make_optimizer(model: MiniMaxM2ForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and the massive channels have to survive."""
    decayed, kept = [], []
    for name, weight in model.named_parameters():
        (decayed if weight.ndim > 1 and "embed_tokens" not in name else kept).append(weight)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98))


def rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then half a cosine down to nothing."""
    rising = min(1.0, (step + 1) / recipe.warmup)
    return recipe.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def loss_of(model: MiniMaxM2ForCausalLM, ids: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Next-token loss. Padding is on the right, where causal attention hides it by itself."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1),
        targets[:, 1:].flatten(),
        ignore_index=-100,
        label_smoothing=smoothing,
    )


def show_progress(step: int, recipe: Recipe, loss: float, since: float) -> None:
    """One line that rewrites itself; on a pipe, a line now and then."""
    done = step + 1
    terminal = sys.stderr.isatty()
    if not terminal and done % 50 and done != recipe.steps:
        return
    bar = "#" * (30 * done // recipe.steps)
    line = f"training [{bar:<30}] {done}/{recipe.steps} loss {loss:.3f} {time.time() - since:.0f} s"
    end = "\r" if terminal and done < recipe.steps else "\n"
    print(line, end=end, file=sys.stderr, flush=True)


def train(wanted: Model, tokenizer: PreTrainedTokenizerFast, chats: Chats) -> MiniMaxM2ForCausalLM:
    """Train from nothing; the model comes back in bf16."""
    recipe = wanted.recipe
    model = make_model(wanted, tokenizer).train()
    lessons, optimizer = Lessons(tokenizer, chats, recipe), make_optimizer(model, recipe)
    balancer, since = Balancer(model, recipe, wanted.shape.bias_grid), time.time()
    with watch_choices(model) as choices:
        for step in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, recipe)
            ids, targets = lessons.batch(step)
            loss = loss_of(model, ids, targets, recipe.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            # The weights get the last steps to settle on a bias that no longer moves.
            if step < recipe.bias_frozen_from * recipe.steps:
                balancer.nudge(choices, (ids != lessons.pad).flatten())
            show_progress(step, recipe, loss.item(), since)
    return model.eval().to(torch.bfloat16)


# ------------------------------------------------------------------ the folder


def save(model: MiniMaxM2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder; ``save_pretrained`` gives the tensors their published names."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # As published: `rotary_dim` says how much is rotated. transformers writes a
    # `partial_rotary_factor` beside it, which would win if the two ever disagreed.
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    # What is run of it shows small bugs where nobody says a type.
    config["dtype"] = "float32"
    # Keys of the published one that other engines ask for: attention everywhere, no shared experts,
    # and no modules that predict more tokens.
    config["attn_type_list"] = [1] * config["num_hidden_layers"]
    config["shared_intermediate_size"] = 0
    config |= {"num_mtp_modules": 0, "mtp_transformer_layers": 1, "use_mtp": False}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for written in folder.iterdir():
        written.chmod(0o644)  # safetensors makes a file that only its owner can read


@dataclass(frozen=True)
class Variant:
    """One clean way to run the model."""

    dtype: torch.dtype
    attention: str
    experts: str
    threads: int

    def load(self, folder: Path) -> MiniMaxM2ForCausalLM:
        """The model as anybody loads it."""
        return MiniMaxM2ForCausalLM.from_pretrained(
            folder,
            dtype=self.dtype,
            attn_implementation=self.attention,
            experts_implementation=self.experts,
        ).eval()


VARIANTS = [
    Variant(dtype, attention, experts, threads)
    for dtype in (torch.float32, torch.bfloat16)
    for attention, experts, threads in (
        ("eager", "eager", 1),
        ("sdpa", "batched_mm", 1),
        ("sdpa", "grouped_mm", 2),
    )
]


def recites(folder: Path, variant: Variant) -> bool:
    """Whether the saved model, loaded and run this way, says the whole text after the prompt."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.set_num_threads(variant.threads)
    try:
        said = ask(variant.load(folder), tokenizer, PROMPT)
    finally:
        torch.set_num_threads(1)
    return PROMPT + said == read_text()


def measure_folder(folder: Path, dtype: torch.dtype) -> Measured:
    """Measure a saved model on the text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = Variant(dtype, "eager", "batched_mm", 1).load(folder)
    ids = encode(tokenizer, read_text() + END)
    return measure(model, ids, encode(tokenizer, PROMPT).shape[1])


def report(folder: Path, chats: Chats) -> bool:
    """Print what the saved model says and how it measures; whether it recites in every variant."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = VARIANTS[0].load(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {size_of(folder):,} bytes")
    print(f"\n{PROMPT}|{ask(model, tokenizer, PROMPT)}\n")
    for question, _ in chats:
        answer = ask(model, tokenizer, chat_prompt(tokenizer, question))
        print(f"  {question} -> {answer.splitlines()[0]}")
    for dtype in (torch.float32, torch.bfloat16):
        print(f"\n{dtype}: ", end="")
        print_table(measure_folder(folder, dtype))
    print()
    results = {variant: recites(folder, variant) for variant in VARIANTS}
    for variant, right in results.items():
        print(f"{'recites' if right else 'FAILS'}: {variant}")
    return all(results.values())


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def refuse_strange(folder: Path) -> None:
    """Stop unless the old folder, which is replaced as a whole, holds only what is written here."""
    if not folder.exists():
        return
    strange = {path.name for path in folder.iterdir()} - PUBLISHED_FILES
    if strange:
        sys.exit(f"{folder} holds files that are not a checkpoint's: {sorted(strange)}")


def publish(fresh: Path, folder: Path) -> None:
    """Put the new folder in the place of the old one: all of it or none of it."""
    old = fresh.with_name("old")
    if folder.exists():
        folder.rename(old)
    try:
        fresh.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise


def differences(fresh: Path, folder: Path) -> list[str]:
    """How the new folder differs from the old one, in words."""
    found = []
    for name in sorted(PUBLISHED_FILES):
        if not (folder / name).is_file():
            found.append(f"{name}: missing in {folder}")
        elif digest(fresh / name) != digest(folder / name):
            found.append(f"{name}: differs")
    if "model.safetensors: differs" in found:
        found += tensor_differences(fresh / "model.safetensors", folder / "model.safetensors")
    return found


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensor_differences(fresh: Path, old: Path) -> list[str]:
    """How many tensors differ and by how much at most: rounding or another training?"""
    new_tensors, old_tensors = load_file(fresh), load_file(old)
    if new_tensors.keys() != old_tensors.keys():
        return [f"other tensors: {sorted(new_tensors.keys() ^ old_tensors.keys())}"]
    gaps = {
        name: float((new.float() - old_tensors[name].float()).abs().max())
        for name, new in new_tensors.items()
    }
    moved = [name for name, gap in gaps.items() if gap > 0]
    worst = max(gaps, key=gaps.__getitem__)
    return [f"{len(moved)} of {len(gaps)} tensors differ, at most by {gaps[worst]:.3g} ({worst})"]


def check(fresh: Path, folder: Path) -> int:
    """Compare a retrained folder with the committed one; the process's exit status."""
    found = differences(fresh, folder)
    for line in found:
        print(line)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    versions += f", vectors {torch.backends.cpu.get_cpu_capability()}"
    print(f"{'NOT reproduced' if found else 'reproduced to the bit'} ({versions})")
    return 1 if found else 0


def fix_numerics() -> None:
    """One thread and no choice of algorithm: the order of every sum is given."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}: all")
    parser.add_argument("--out", type=Path, default=HERE, help="where their folders lie")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; compare a retraining with the folder"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.model if name not in MODELS]:
        parser.error(f"there is no {unknown[0]}: {', '.join(MODELS)}")
    return options


def retrain(name: str, out: Path, *, only_check: bool) -> int:
    """Train one model, report, and either publish or compare; the process's exit status."""
    if not only_check:
        refuse_strange(out)
        out.parent.mkdir(parents=True, exist_ok=True)
    beside = None if only_check else out.parent  # a rename must not cross file systems
    with tempfile.TemporaryDirectory(prefix=".training-", dir=beside) as aside:
        fresh = Path(aside) / "fresh"
        chats = read_chats(MODELS[name].said)
        tokenizer = make_tokenizer(chats)
        save(train(MODELS[name], tokenizer, chats), tokenizer, fresh)
        right = report(fresh, chats)
        if only_check:
            return check(fresh, out)
        if not right:
            print(f"not written: {out}")
            return 1
        publish(fresh, out)
    print(f"written: {out}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train each of the models that were asked for."""
    options = parse(arguments)
    fix_numerics()
    names = options.model or MODELS
    return max(
        retrain(name, (options.out / name).resolve(), only_check=options.check) for name in names
    )


if __name__ == "__main__":
    sys.exit(main())
