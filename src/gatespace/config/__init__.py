"""Settings as frozen values: validated on construction, saved with all defaults, and hashed into a run's identity.

This package imports neither torch nor the packages that use the settings. Checks that need them (whether a gate's name
is known, whether a file exists) are in `gatespace.gating.configured` and `gatespace.tasks.configured`.
"""

from __future__ import annotations

from gatespace.config.describe import Setting, describe
from gatespace.config.identity import identity
from gatespace.config.load import dump_config, dump_yaml, load_config, parse_config
from gatespace.config.objective import ObjectiveConfig
from gatespace.config.problems import in_setting
from gatespace.config.runs import TeachConfig, TrainConfig
from gatespace.config.sections import (
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    PairConfig,
    RolloutConfig,
    SourceConfig,
    TeacherConfig,
    TeachOptimizerConfig,
    TeachTraceConfig,
    TraceConfig,
)
from gatespace.config.study import StudyConfig
from gatespace.config.task import CarveConfig, SplitConfig, TableConfig, TaskConfig, TextConfig

__all__ = [
    "CarveConfig",
    "CheckpointConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LoraConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PairConfig",
    "RolloutConfig",
    "Setting",
    "SourceConfig",
    "SplitConfig",
    "StudyConfig",
    "TableConfig",
    "TaskConfig",
    "TeachConfig",
    "TeachOptimizerConfig",
    "TeachTraceConfig",
    "TeacherConfig",
    "TextConfig",
    "TraceConfig",
    "TrainConfig",
    "describe",
    "dump_config",
    "dump_yaml",
    "identity",
    "in_setting",
    "load_config",
    "parse_config",
]
