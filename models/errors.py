"""The one error of this package: a checkpoint's configuration that Octavo cannot run."""


class ModelConfigError(ValueError):
    """A model's configuration lacks something, is malformed or names something unknown; the message says what."""
