"""The entries of a ``quantization_config``, typed. A null equals an absent key. No jax here."""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import ModelConfigError


class Fields:
    """One object of the configuration. Every method raises ModelConfigError, naming the key, for what does not fit."""

    def __init__(self, values: Any, path: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelConfigError(f"{path} must be an object, got {values!r}")
        self._values = {key: value for key, value in values.items() if value is not None}
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def refuse(self, key: str, found: Any, supported: str) -> NoReturn:
        raise ModelConfigError(f"{self._path}: {key} {found!r} is not supported; supported: {supported}")

    def over(self, changes: Any, path: str) -> "Fields":
        """These entries with ``changes`` put over them."""
        return Fields({**self._values, **Fields(changes, f"{self._path}.{path}")._values}, f"{self._path}.{path}")

    def mapping(self, key: str) -> Mapping[str, Any]:
        return Fields(self._values.get(key, {}), f"{self._path}.{key}")._values

    def object(self, key: str) -> "Fields":
        return Fields(self._values.get(key, {}), f"{self._path}.{key}")

    def integer(self, key: str, default: int | None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelConfigError(f"{self._path}: {key} must be an integer, got {value!r}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"{self._path}: {key} must be true or false, got {value!r}")
        return value

    def group_size(self, key: str) -> int | None:
        """Columns; None for -1, the whole row."""
        value = self.integer(key, None)
        if value == -1:
            return None
        if value < 1:
            self.refuse(key, value, "-1, or a number of columns")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise ModelConfigError(f"{self._path}: {key} must be a list of names, got {value!r}")
        return tuple(value)

    def nested_names(self, key: str) -> tuple[str, ...]:
        """Of a list of names, or of lists of names."""
        value = self._values.get(key, ())
        if not isinstance(value, list | tuple):
            raise ModelConfigError(f"{self._path}: {key} must be a list of names, or of lists of them, got {value!r}")
        found = [name for item in value for name in (item if isinstance(item, list | tuple) else [item])]
        return Fields({key: found}, self._path).names(key)

    def block(self, key: str) -> tuple[int, int] | None:
        """Rows and columns that share a scale."""
        value = self._values.get(key)
        if value is None:
            return None
        sound = isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)
        if not sound:
            raise ModelConfigError(f"{self._path}: {key} must be two positive integers, got {value!r}")
        return value[0], value[1]

    def regex(self, key: str, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelConfigError(f"{self._path}: {key}: {pattern!r} is no regular expression: {error}") from error
        return pattern
