"""Pre-flight checks of a study: data, models and sequence lengths, as far as they are available on this machine.

Errors that would fail every run in its first step are raised here once. Models on the Hugging Face Hub are checked by
the run that downloads them, and a teacher behind a service by that service.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from gatespace.config import ObjectiveConfig, StudyConfig, TeachConfig, TrainConfig, in_setting
from gatespace.config.address import is_address
from gatespace.errors import missing_extra
from gatespace.models import Model
from gatespace.models.load import SMOLLM2, TINY, hub_name
from gatespace.plugins import load_plugins, provided
from gatespace.study.plan import ROLES, teach_config, train_config
from gatespace.tasks.data import Task
from gatespace.training.fit import check_fit, check_models, check_teachers, check_top_k
from gatespace.training.setup import ModelSpec, encoder_for, load_shapes, material, teacher_encoder_for


def check_study(study: StudyConfig, made: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Raise any error the study's runs would fail with; return notes for the user.

    Args:
        study: The study file.
        made: Task with runs → role → folder of a model the study has already trained.
    """
    load_plugins(study.plugins)
    notes: dict[str, None] = {}
    for task, models in made.items():
        with in_setting(f"{study.name}: {task}"):
            notes.update(dict.fromkeys(_check_task(study, task, models)))
    return [*notes]


def _check_task(study: StudyConfig, task: str, made: Mapping[str, str]) -> list[str]:
    notes: list[str] = []
    models = dict(made)
    for role in ROLES:
        teach = teach_config(study, task, role)
        if teach is None or role in made:
            continue
        _check_packages(teach)
        models[role] = teach.model
        with in_setting(f"teach.{role}"):
            data = material(teach.task, "teacher")
            spec = ModelSpec(teach.model, "model", role, teach.revision, teach.trust_remote_code)
            model = _shapes(spec, data.task)
            if model is not None:
                encoder = encoder_for(data, model, (*teach.evaluation.final, teach.evaluation.split), share=False)
                notes += check_fit(teach, data, encoder, model=model)
    config = train_config(study, task, study.seeds[0], {}, models=models)
    return notes + _check_runs(study, config)


def _check_runs(study: StudyConfig, config: TrainConfig) -> list[str]:
    pair, data = config.pair, material(config.task, "distill")
    _check_packages(config)
    student = _shapes(ModelSpec.of(pair, "student"), data.task)
    check_teachers(config, data)
    teachers: dict[str, Model] = {}
    for scorer, where in pair.scorers().items():
        spec = ModelSpec.of(pair.alone(scorer), "teacher", f"pair.{scorer}")
        if not is_address(where) and (teacher := _shapes(spec, data.task)) is not None:
            teachers[scorer] = teacher
    if student is None:
        return []
    for teacher in teachers.values():
        check_models(config, student, teacher)
    for method in study.axes.published:
        goal = ObjectiveConfig(method=method.method, params=method.params)
        check_top_k(goal, student.vocab_size, f"axes.published.{method.point}")
    teacher_encoder_for(config, data, student, teachers)
    encoder = encoder_for(data, student, (*config.evaluation.final, config.evaluation.split), share=False)
    return check_fit(config, data, encoder, student=student, **teachers)


def _shapes(spec: ModelSpec, task: Task) -> Model | None:
    """Return the model without its weights, or None if it is not on this machine."""
    if spec.name not in (*TINY, SMOLLM2) and not Path(spec.name).expanduser().is_dir():
        with in_setting(spec.setting):
            hub_name(spec.name)
        return None
    return load_shapes(spec, task)


def _check_packages(config: TrainConfig | TeachConfig) -> None:
    """Raise if an optional package is missing that loading data and models would not notice."""
    wanted = {
        extra: (f"the tracker {name}", extra)
        for name in config.trace.trackers
        for extra in provided("trackers")[name].extras
    }  # the extra is named after its package
    if (config.pair.lora if isinstance(config, TrainConfig) else config.lora) is not None:
        wanted["peft"] = ("LoRA", "lora")
    for module, (feature, extra) in wanted.items():
        if importlib.util.find_spec(module) is None:
            raise missing_extra(feature, module=module, extra=extra)
