"""The base of configuration sections: frozen, documented by field, closed to unknown keys.

Deliberately free of torch, Megatron and vLLM, so that a configuration is checked in milliseconds on
a login node, before anything heavy is imported.
"""

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """A section of the run's configuration.

    Sections are frozen, take keywords only, refuse unknown keys, and keep the string under each
    field as that field's documentation (shown by ``megatron-rl config``).
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
