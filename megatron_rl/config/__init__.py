"""The schema of a run: load, override, validate, dump. Imports no torch."""

from megatron_rl.config.load import (
    ConfigError,
    apply_overrides,
    dump_config,
    load_config,
    read_yaml,
    validate,
)
from megatron_rl.config.run import (
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    PolicyConfig,
    RunConfig,
    TrainerConfig,
)
from megatron_rl.config.sections import (
    AlgorithmConfig,
    DataConfig,
    DataSourceConfig,
    KLConfig,
    ModelConfig,
    PerfectibleConfig,
    PrecisionConfig,
    RewardConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ConfigError",
    "DataConfig",
    "DataSourceConfig",
    "EvaluationConfig",
    "KLConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PerfectibleConfig",
    "PolicyConfig",
    "PrecisionConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "TrainerConfig",
    "apply_overrides",
    "dump_config",
    "load_config",
    "read_yaml",
    "validate",
]
