"""Where a model's files are and what its configuration says; neither its weights nor its tokenizer are read."""

from ..models.errors import ModelConfigError
from ..models.loading.errors import LoadError
from ..models.loading.resolve import ResolvedModel, resolve_model
from .config import ModelOptions
from .errors import ConfigError


def find_model(options: ModelOptions, path: str | None = None) -> ResolvedModel:
    """The model that ``options`` name, downloaded if need be; with ``path``, the one that was found there before.

    Raises ConfigError.
    """
    try:
        return resolve_model(
            path or options.model,
            revision=options.revision if path is None else None,
            download_dir=options.download_dir,
            load_format=options.load_format,
            quantization=options.quantization,
            hf_overrides=options.hf_overrides,
        )
    except (LoadError, ModelConfigError) as error:
        raise ConfigError(str(error)) from error
