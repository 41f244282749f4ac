"""Compiled programs kept between starts: found again, never the wrong ones, and no start fails for them."""

import logging
import os
import time

import jax
import jax.numpy as jnp
import pytest

from octavo.engine import executable_cache
from octavo.engine.compile_cache import without_jax_cache
from octavo.engine.executable_cache import ExecutableCache


def compile_double():
    with without_jax_cache():  # as warm-up does: what comes from JAX's cache cannot be serialized again
        return jax.jit(lambda x: 2 * x, donate_argnums=0).lower(jnp.zeros(3)).compile()


def never():
    raise AssertionError("compiled although it was kept")


def open_cache(folder, *inputs):
    return ExecutableCache(folder, inputs, jax.devices()[:1])


def compile_into(folder, *inputs):
    """What a start does; its program is written when this returns."""
    cache = open_cache(folder, *inputs)
    program = cache.get("step", compile_double)
    cache.keep()
    for writer in executable_cache._being_written.values():
        writer.join()
    return program


def test_a_kept_program_is_found_by_the_next_start_and_still_donates(tmp_path):
    compile_into(tmp_path, "model")
    again = open_cache(tmp_path, "model")
    program = again.get("step", never)
    x = jnp.ones(3)
    assert program(x).tolist() == [2.0, 2.0, 2.0]
    assert x.is_deleted()
    assert again.num_loaded == 1


@pytest.mark.parametrize("other", [("another model",), ("model", "more"), ("mod", "el")])
def test_other_inputs_find_nothing(tmp_path, other):
    compile_into(tmp_path, "model")
    with pytest.raises(AssertionError, match="although"):
        open_cache(tmp_path, *other).get("step", never)


def test_other_source_finds_nothing(tmp_path, monkeypatch):
    compile_into(tmp_path, "model")
    monkeypatch.setattr(executable_cache, "source_digest", lambda: b"changed")
    with pytest.raises(AssertionError, match="although"):
        open_cache(tmp_path, "model").get("step", never)


def test_the_digest_covers_code_tuned_files_and_versions(tmp_path, monkeypatch):
    package = tmp_path / "package"
    for folder in ("engine", "models", "pallas_kernels/tuned/gpu"):
        (package / folder).mkdir(parents=True)
    monkeypatch.setattr(executable_cache, "__file__", str(package / "engine" / "executable_cache.py"))
    digests = []

    def note():
        executable_cache.source_digest.cache_clear()
        digests.append(executable_cache.source_digest())

    note()
    (package / "models" / "decoder.py").write_text("a = 1")
    note()
    (package / "models" / "decoder.py").write_text("a = 2")
    note()
    (package / "pallas_kernels/tuned/gpu/op.json").write_text("[]")
    note()
    monkeypatch.setattr(executable_cache.importlib.metadata, "version", lambda name: "9")
    note()
    executable_cache.source_digest.cache_clear()
    assert len(set(digests)) == 5


@pytest.mark.parametrize("inputs", [("<object at 0x7f00deadbeef>",), ("model", "<at 0x7f00deadbeef>")])
def test_inputs_that_name_an_address_keep_nothing(tmp_path, inputs):
    compile_into(tmp_path, *inputs)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_compiled_again_and_replaced(tmp_path, caplog):
    compile_into(tmp_path, "model")
    (path,) = tmp_path.glob("programs-*/step")
    path.write_bytes(path.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        assert compile_into(tmp_path, "model")(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert str(path) in caplog.text
    open_cache(tmp_path, "model").get("step", never)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert compile_into(blocked, "model")(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert "not kept" in caplog.text


def test_without_a_folder_everything_is_compiled():
    assert compile_into(None)(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_programs_unused_for_long_are_removed_and_used_ones_stay(tmp_path):
    for name in ("old", "recent", "current"):
        compile_into(tmp_path, name)
    folder_of = {name: open_cache(tmp_path, name)._folder for name in ("old", "recent", "current")}
    long_ago = time.time() - (executable_cache.KEPT_DAYS + 1) * 24 * 3600
    for name in ("old", "current"):
        os.utime(folder_of[name], (long_ago, long_ago))
    open_cache(tmp_path, "current")
    assert set(tmp_path.iterdir()) == {folder_of["recent"], folder_of["current"]}


def test_a_start_right_after_another_waits_for_what_is_being_written(tmp_path):
    cache = open_cache(tmp_path, "model")
    cache.get("step", compile_double)
    cache.keep()
    open_cache(tmp_path, "model").get("step", never)


def test_two_starts_at_once_share_a_folder(tmp_path):
    """Each writes all; whoever comes last wins, and at no moment is there half a program."""
    starts = [open_cache(tmp_path, "model") for _ in range(4)]
    for start in starts:
        start.get("step", compile_double)
    for start in starts:
        start.keep()
    for writer in list(executable_cache._being_written.values()):
        writer.join()
    assert open_cache(tmp_path, "model").get("step", never)(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_what_a_killed_start_left_behind_is_passed_over(tmp_path):
    compile_into(tmp_path, "model")
    (path,) = tmp_path.glob("programs-*/step")
    path.with_name("step.4711").write_bytes(b"half a program")
    path.with_name("other.4711").write_bytes(b"")
    cache = open_cache(tmp_path, "model")
    cache.get("step", never)
    assert cache.get("other", compile_double)(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
