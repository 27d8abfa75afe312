"""The `task` section: the data and its splits, how the model is prompted, and how responses are scored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gatespace.config.base import SPLITS, Count, Fault, Name, Place, Section, Seed, Share, Switch, Text


class CarveConfig(Section):
    """Shares of the training rows that become val and test where the data has none."""

    val: Share = 0.1
    """The share of train that becomes val, where the data has no val rows."""

    test: Share = 0.2
    """The share of train that becomes test, where the data has no test rows."""

    @model_validator(mode="after")
    def _something_is_left(self) -> CarveConfig:
        if self.val + self.test >= 1:
            raise Fault("", "the shares of val and test leave nothing of train")
        return self

    def shares(self) -> dict[str, float]:
        """Split → share, without shares of 0."""
        return {name: share for name, share in (("val", self.val), ("test", self.test)) if share > 0}


def _source(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, Mapping) or not all(isinstance(part, str | Path) and str(part) for part in value.values()):
        raise ValueError("must be a file, a folder, a mapping of split to file, or a dataset of the Hub")
    files = {str(split): str(part) for split, part in value.items()}
    for split in files:
        if split not in SPLITS:
            raise ValueError(f"{split!r} is not a split: train, val or test")
    if "train" not in files:
        raise ValueError("a mapping of split to file must name train")
    return {split: files[split] for split in SPLITS if split in files}


def _different(labels: tuple[str, ...]) -> tuple[str, ...]:
    if len(labels) < 2:
        raise ValueError("must have at least two labels")
    if len(set(labels)) < len(labels):
        raise ValueError("must not name a label twice")
    return labels


class DataConfig(Section):
    """Your own data."""

    source: Annotated[str | dict[str, str], BeforeValidator(_source)]
    """A file (.jsonl, .csv, .tsv, .parquet; its rows are train), a folder with train, val and test files, a mapping of
    split to file ($VARIABLES are filled in), or a Hub dataset as `owner/name` or `owner/name:config`."""

    teacher_column: Name | None = None
    """The column that names the teacher of each training row, one of pair.teachers; null: all rows have the same."""

    carve: CarveConfig = CarveConfig()
    """Shares of train that become val and test where the data has none."""

    carve_seed: Seed = 0
    """The seed of that choice. It is independent of the run's seed, so all seeds are tested on the same rows."""

    name: Name | None = None
    """The name of the task in reports; null: made from the source."""


class TableConfig(DataConfig):
    """Your own classification data."""

    labels: Annotated[tuple[Name, ...], AfterValidator(_different)]
    """All labels, in the order of the data's integers where it has integers."""

    definitions: dict[Name, Text] = Field(default={})
    """A brief sentence for each label, shown in the prompt; {} for none."""

    text_column: Name = "text"
    """The column or key of the text."""

    label_column: Name = "label"
    """The column or key of the label."""

    metric: Name = "accuracy"
    """How a label is judged: accuracy, or a metric that a plugin registers. Validation selects by it, and reports use
    it."""

    question: Name = "Which label fits the text best?"
    """What the prompt asks about a text."""


class TextConfig(DataConfig):
    """Your own data whose responses are free text."""

    prompt: Name | None = None
    """The user's turn, with columns in braces: "Describe: {mr}". A brace itself is written twice."""

    messages: Name | None = None
    """Instead of `prompt`: the column of a conversation, a list of {role, content} as TRL and OpenAI write it."""

    answer: Name | None = None
    """The column of the right response: a text, or a list of texts that are all right. null: the last turn of
    `messages`."""

    metric: Name = "exact"
    """How a response is compared with the references, of which the best counts: exact, contains, regex (the reference
    is a regular expression), number (the last one, or that after ####), token_f1, rouge_l, bleu, chrf (the last three
    need the extra `text`), or one that a plugin registers. Validation selects by it, and reports use it."""

    also: tuple[Name, ...] = ()
    """Further metrics to evaluate."""

    columns: tuple[Name, ...] = ()
    """Further columns that a plugin's metric reads."""

    system: Text = ""
    """The system message; "" for none."""

    stop: tuple[Name, ...] = ()
    """Texts at which a response ends, in addition to the end of the turn; they are not part of it."""

    thinking: Switch = False
    """Enable thinking in models that support it; the thinking is trained on but not evaluated."""

    max_prompt_tokens: Count | None = None
    """The longest prompt, in tokens; null: as long as prompt and response fit into the context window."""

    too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to a longer prompt: refuse is an error, truncate cuts the end of its longest turn. The
    teacher's own prompt (teacher.prompt) is not cut."""

    group: Switch = True
    """Merge rows with the same prompt into one row with all references. A teacher learns each of them."""

    @model_validator(mode="after")
    def _one_prompt(self) -> TextConfig:
        if self.prompt is None and self.messages is None:
            raise Fault("prompt", "a text task has a prompt or messages", instead='e.g. "Describe: {mr}"')
        if self.prompt is not None and self.messages is not None:
            raise Fault("messages", "a text task has a prompt or messages, not both")
        if self.prompt is not None and self.answer is None:
            raise Fault("answer", "which column has the right response?")
        if self.too_long == "truncate" and self.max_prompt_tokens is None:
            raise Fault("too_long", "truncate needs max_prompt_tokens")
        return self


class SplitConfig(Section):
    """Shares of the training rows that the teacher is trained on, and that provide the prompts of distillation.

    A part not listed gets no rows. The parts never share a text: a teacher that has memorised the prompts would inflate
    its student's results.
    """

    teacher: Share = 0.0
    """The share of the training rows that `gatespace teach` learns from."""

    distill: Share = 0.0
    """The share of the training rows whose texts are the prompts of `gatespace train`."""

    @model_validator(mode="after")
    def _is_a_split(self) -> SplitConfig:
        total = self.teacher + self.distill
        if not 0 < total <= 1 + 1e-9:
            raise Fault("", "the shares must sum to more than 0 and at most 1", instead="teacher: 0.6, distill: 0.4")
        return self

    def shares(self) -> dict[str, float]:
        """Part → share, without shares of 0, in a fixed order that the choice of rows depends on."""
        return {name: share for name, share in (("teacher", self.teacher), ("distill", self.distill)) if share > 0}


class TaskConfig(Section):
    """Texts to label, or prompts for free text, and how a model is prompted."""

    name: Name | None = "tweeteval/emotion"
    """A task by name: tweeteval/emotion, tweeteval/hate, tweeteval/offensive, any other of TweetEval, synthetic, or
    one that a plugin registers; null where `table` or `text` says what the data is."""

    root: Place | None = None
    """The folder of TweetEval's files; null: $GATESPACE_TWEETEVAL, then the Hugging Face Hub."""

    table: TableConfig | None = None
    """Your own labelled data, instead of a name."""

    text: TextConfig | None = None
    """Your own data with free-text responses, instead of a name."""

    prefill: Text = '{"label": "'
    """How the assistant's turn begins, so that the first decoded token is the first token of a label and u says
    something about the text. With "" the model writes the whole answer; u is then near 0 for every text. The default
    for free text is ""."""

    brief: Switch = False
    """Show the labels only, without instructions: for models trained from scratch."""

    split: SplitConfig | None = SplitConfig(teacher=0.6, distill=0.4)
    """Disjoint parts of the training rows for the teacher and for distillation; null: all rows for both."""

    split_seed: Seed = 0
    """The seed of that split. It is not the run's seed: the teacher's rows stay the same over seeds."""

    @model_validator(mode="before")
    @classmethod
    def _a_table_needs_no_name(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        usual: dict[str, object] = {} if data.get("text") is None else {"name": None, "prefill": ""}
        if data.get("table") is not None:
            usual |= {"name": None}
        return {**usual, **data}

    @model_validator(mode="after")
    def _one_source(self) -> TaskConfig:
        if self.text is not None:
            for field in ("name", "table", "root", "brief"):
                if getattr(self, field):
                    raise Fault(field, "has no meaning beside task.text, which says what the data is", instead="null")
            return self
        if self.table is None and self.name is None:
            raise Fault("name", "a task has a name or a table", instead="e.g. tweeteval/emotion")
        if self.table is not None and self.name is not None:
            raise Fault("name", "a task has a name or a table, not both", instead="name: null; table.name is for show")
        if self.table is not None and self.root is not None:
            raise Fault("root", "root is TweetEval's folder, and the data is a table", instead="table.source")
        return self
