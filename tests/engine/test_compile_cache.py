"""Where compiled programs are kept: whatever is wrong with the folder, the engine starts."""

import logging
from pathlib import Path

import jax
import pytest

from octavo.engine.compile_cache import enable_compile_cache, machine_key, program_settings, without_jax_cache


@pytest.fixture(autouse=True)
def kept_settings():
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    values = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in values.items():
        jax.config.update(name, value)


def test_programs_are_kept_by_kind_of_machine(tmp_path):
    path = enable_compile_cache(str(tmp_path / "cache"))
    assert path == tmp_path / "cache" / machine_key()
    assert path.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(path)


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache(str(tmp_path / "file")) is None
    assert "not kept" in caplog.text
    assert jax.config.jax_compilation_cache_dir == before


def test_a_user_without_a_home_is_a_warning(monkeypatch, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache(None) is None
    assert "home directory" in caplog.text


def test_engines_that_start_side_by_side_turn_jax_cache_on_again_only_at_the_end():
    first, second = without_jax_cache(), without_jax_cache()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not jax.config.values["jax_enable_compilation_cache"]
    second.__exit__(None, None, None)
    assert jax.config.values["jax_enable_compilation_cache"]


@pytest.mark.parametrize(("option", "value"), [("jax_default_matmul_precision", "highest"), ("jax_enable_x64", True)])
def test_what_changes_programs_changes_their_key(option, value):
    device, before = jax.devices()[0], jax.config.values[option]
    plain = program_settings(device)
    jax.config.update(option, value)
    try:
        assert program_settings(device) != plain
    finally:
        jax.config.update(option, before)
    assert program_settings(device) == plain
