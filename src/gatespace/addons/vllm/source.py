"""Files of a model for vLLM: metadata without loading its weights in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatespace.errors import UsageError, missing_extra
from gatespace.models.hub import first_line, without_progress_bars
from gatespace.models.load import located

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Configuration and tokenizer. Weights are safetensors only: unpickling can execute code."""
_WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class VllmSource:
    """The files of a model."""

    name: str
    """As given by the user."""
    folder: Path
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    config: Any = field(repr=False)
    """Of the text model."""

    @property
    def vocab_size(self) -> int:
        """Number of tokenizer ids."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def rows(self) -> int:
        """Rows of the head; those beyond `vocab_size` are padding."""
        return int(self.config.vocab_size)

    @property
    def reach(self) -> int | None:
        """Maximum number of positions."""
        reach = getattr(self.config, "max_position_embeddings", None)
        return reach if isinstance(reach, int) and reach > 0 else None

    def fingerprint(self) -> str:
        """Hash the configuration and weight files, independent of their location.

        Unlike `Model.fingerprint`, it also changes when the same weights are sharded differently.
        """
        files = sorted(self.folder.glob(_WEIGHTS))
        if not files:
            raise UsageError(f"the weights of {self.name} are not here", got=self.folder)
        with ThreadPoolExecutor() as pool:
            lines = pool.map(_line, [self.folder / "config.json", *files])
            return hashlib.sha256(b"gatespace files 1\n" + "".join(lines).encode()).hexdigest()


def vllm_source(name: str, *, weights: bool, report: Callable[[str], None] | None = None) -> VllmSource:
    """Return the files of a model, downloaded from the Hub if missing.

    Args:
        name: As in `load_model`.
        weights: Whether the weights are needed, because vLLM is started here.
        report: Called with a message about slow steps.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("a model for vLLM", module="transformers", extra="train") from error
    where, options, source = located(name, None, report)
    folder = Path(where)
    try:
        if source is None:
            from huggingface_hub import snapshot_download

            patterns = [*_SMALL, *([_WEIGHTS] if weights else [])]
            with without_progress_bars():
                folder = Path(snapshot_download(where, allow_patterns=patterns, **options))
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # old or unusual files fail in many ways
        raise UsageError(f"{name} could not be read for vLLM", got=first_line(error)) from error
    return VllmSource(name, folder.absolute(), tokenizer, config.get_text_config())


def _line(file: Path) -> str:
    with file.open("rb") as content:
        return f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n"
