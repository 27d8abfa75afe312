"""A student and a larger teacher of Qwen3's architecture, built from scratch: for the demo and tests.

They are small enough to learn a synthetic task in a minute on one core, and deliberately as awkward as real pairs: the
heads are padded to different sizes, and one of them is tied to the embedding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from gatespace.errors import UsageError, missing_extra
from gatespace.models.cache_root import cache_root, new_folder, read_record, write_record
from gatespace.models.hub import without_progress_bars
from gatespace.seeding import stream
from gatespace.tasks import Prompt, Task

END_OF_TEXT, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INITIALIZER_RANGE = 0.08
"""With the usual 0.02, networks of this size stay at the most frequent label in the steps they get."""

_RECIPE_VERSION = 1


@dataclass(frozen=True)
class TinySize:
    """The size of one network.

    Args:
        hidden: Width.
        layers: Depth.
        heads: Attention heads; there are half as many for keys and values.
        tied: Whether the head is the embedding.
        pad_to: The rows of the embedding are a multiple of this.
        spare: Least number of rows beyond the tokenizer's tokens.
    """

    hidden: int
    layers: int
    heads: int
    tied: bool
    pad_to: int
    spare: int


STUDENT = TinySize(hidden=64, layers=2, heads=4, tied=True, pad_to=128, spare=65)
TEACHER = TinySize(hidden=128, layers=3, heads=4, tied=False, pad_to=64, spare=1)
# The teacher has at most 64 spare rows and the student at least 65: never the same number.


class TinyPair(NamedTuple):
    """The folders of the two models."""

    student: Path
    teacher: Path


def build_tiny(
    task: Task,
    folder: Path | None = None,
    *,
    seed: int = 0,
    vocab_size: int = 1024,
    student: TinySize = STUDENT,
    teacher: TinySize = TEACHER,
) -> TinyPair:
    """Build the pair for a task, or reuse it if it exists: the same arguments give the same bytes.

    Args:
        task: The tokenizer is trained on its train texts, its prompt and its gold responses.
        folder: Gets the folders `student` and `teacher`. None: a new one in the user's cache.
        seed: Of the weights.
        vocab_size: The most tokens the tokenizer may have; texts of few words give fewer.
        student: Student size.
        teacher: Teacher size.
    """
    transformers = _transformers()
    if vocab_size < 256 + len(SPECIAL):
        raise UsageError("a byte-level vocabulary has at least 259 tokens", got=f"vocab_size={vocab_size}")
    sizes = {"student": student, "teacher": teacher}
    recipe = {
        "version": _RECIPE_VERSION,
        "task": task.digest,
        "seed": seed,
        "vocab_size": vocab_size,
        "sizes": {role: asdict(size) for role, size in sizes.items()},
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    root = folder or cache_root() / "tiny" / digest[:16]
    pair = TinyPair(root / "student", root / "teacher")
    if all(read_record(place).get("recipe") == digest for place in pair):
        return pair
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        tokenizer = None
        for place, (role, size) in zip(pair, sizes.items(), strict=True):
            if read_record(place).get("recipe") == digest:
                continue
            tokenizer = tokenizer or _tokenizer(transformers, task, vocab_size)
            network = _network(transformers, size, tokenizer, seed, role)
            with new_folder(place) as fresh, without_progress_bars():
                network.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
                source = f"a tiny {role} made for {task.name}, seed {seed}"
                write_record(fresh, {"name": f"tiny-{role}", "source": source, "recipe": digest})
    return pair


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("a tiny pair", module="transformers", extra="train") from error
    return transformers


def _corpus(task: Task) -> Iterator[str]:
    if not task.labels:
        yield "system\nuser\nassistant\n"
        yield from (part for row in task.lessons(task.rows("train")) for part in (row.text, row.gold))
        return
    for brief in (True, False):
        prompt = Prompt.of(task, brief=brief)
        yield from (prompt.fixed, *(prompt.prefill + prompt.gold_response(label) for label in task.labels))
    yield from ("system\nuser\nassistant\n", *(row.text for row in task.train))


def _tokenizer(transformers: Any, task: Task, vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(task), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _network(transformers: Any, size: TinySize, tokenizer: Any, seed: int, role: str) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=-(-(len(tokenizer) + size.spare) // size.pad_to) * size.pad_to,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 2),
        head_dim=size.hidden // size.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=size.tied,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        network = transformers.Qwen3ForCausalLM(config).eval()
    # Weights by name, not in the order in which a version of transformers happens to create them.
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                draw = torch.Generator().manual_seed(stream(seed, "models", "tiny", role, name) % 2**63)
                parameter.normal_(std=INITIALIZER_RANGE, generator=draw)
    return network
