"""Schema of the configuration: one dataclass per section, holding every default exactly once."""

from trainer.config.schema.run import RunConfig

__all__ = ["RunConfig"]
