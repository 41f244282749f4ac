"""``octavo tune`` on the command line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.engine.errors import ConfigError
from octavo.serving import cli, flags, tune


def make_options(model, **options):
    return SimpleNamespace(model=model, **options)


@pytest.fixture
def tuner(monkeypatch):
    asked = SimpleNamespace(model=None, options=None, output_dir=None, error=None)

    def fake(options, *, output_dir, progress):
        asked.model, asked.options, asked.output_dir = options.model, vars(options), output_dir
        if asked.error:
            raise asked.error
        progress("a candidate")
        return [Path("folder/a.json"), Path("folder/b.json")]

    monkeypatch.setattr(tune, "_load", lambda module: SimpleNamespace(tune=fake, TuneOptions=make_options))
    return asked


def test_options_reach_the_tuner_and_files_are_printed(tuner, capsys):
    options = "--tensor-parallel-size 2 --block_size 32 --dtype float16 -q int4 --kv-cache-dtype fp8"
    options += " --output-dir folder"
    assert cli.main(["tune", "llama-3-8b", *options.split()]) == 0
    assert tuner.model == "llama-3-8b"
    assert tuner.options == {
        "model": "llama-3-8b",
        "quantization": "int4",
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 2,
        "block_size": 32,
        "dtype": "float16",
    }
    assert tuner.output_dir == Path("folder")
    printed = capsys.readouterr()
    assert printed.out == "folder/a.json\nfolder/b.json\n"
    assert printed.err == "a candidate\n"


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        (["m"], ConfigError("octavo tune measures on an NVIDIA GPU"), "measures on an NVIDIA GPU"),
        (["m"], PermissionError("cannot write"), "cannot write"),
        ([], None, "name the model"),
        (["m", "--model", "n"], None, "given twice"),
    ],
)
def test_what_cannot_be_done_is_said_with_exit_code_2(tuner, arguments, error, complaint, capsys):
    tuner.error = error
    with pytest.raises(SystemExit) as refused:
        cli.main(["tune", *arguments])
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


def test_serve_takes_the_folder():
    args = cli.make_parser().parse_args(["serve", "--tuned-config-folder", "folder"])
    assert flags.engine_args(args).tuned_config_folder == "folder"
