"""Hugging Face directories: exact round trips, strict reading, atomic writing."""

import json
import os
import stat
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools.atomic import new_directory
from checkpoints_tools.hf import ASSET_NAMES, HFReader, write_hf_directory
from megatron_rl.models.layout import same_bits

CONFIG = {"architectures": ["LlamaForCausalLM"], "note": "häßlich"}


def tensors(count=7):
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)
    return {
        f"layer.{i}.weight": (torch.randn(3 + i, 5, generator=generator) * 3).to(
            dtypes[i % len(dtypes)]
        )
        for i in range(count)
    }


def write(path, given=None, **options):
    given = tensors() if given is None else given
    write_hf_directory(path, hf_config=CONFIG, tensors=iter(given.items()), **options)


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 200, 10**9])
def test_round_trip_is_bitwise_for_any_shard_size(tmp_path, max_shard_bytes):
    write(tmp_path / "m", max_shard_bytes=max_shard_bytes)
    reader = HFReader(tmp_path / "m")
    expected = tensors()
    assert set(reader) == set(reader.keys()) == set(expected) and len(reader) == len(expected)
    for name, tensor in expected.items():
        assert name in reader and reader.shape(name) == tuple(tensor.shape)
        assert same_bits(reader[name], tensor)
    assert reader.config == CONFIG and reader.generation_config is None
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    index = tmp_path / "m" / "model.safetensors.index.json"
    if max_shard_bytes == 10**9:
        assert files == ["model.safetensors"] and not index.exists()
        return
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    content = json.loads(index.read_text())
    assert content["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    for file in files:
        held = load_file(tmp_path / "m" / file)
        assert {n for n, f in content["weight_map"].items() if f == file} == set(held)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= max_shard_bytes


def test_only_one_shard_is_held(tmp_path):
    alive = []

    def produce():
        for i in range(6):
            # A tensor's memory dies with the array it was made from. The last one is pending.
            assert sum(ref() is not None for ref in alive) <= 1, "earlier shards were kept"
            array = np.full((10, 10), float(i))
            alive.append(weakref.ref(array))
            yield f"t{i}", torch.from_numpy(array)
            del array

    write_hf_directory(tmp_path / "m", hf_config=CONFIG, tensors=produce(), max_shard_bytes=1)
    assert len(HFReader(tmp_path / "m")) == 6


def test_views_aliases_and_transposes_are_written_by_value(tmp_path):
    base = torch.arange(24.0).reshape(6, 4)
    given = {"top": base[:3], "overlap": base[1:5], "whole": base, "t": base.T, "again": base}
    write(tmp_path / "m", given)
    reader = HFReader(tmp_path / "m")
    assert all(same_bits(reader[name], tensor.contiguous()) for name, tensor in given.items())


def test_files_have_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        write(tmp_path / "m", max_shard_bytes=100)
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "m").iterdir()}
    assert modes == {0o644} and stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o755


def test_interrupted_write_leaves_nothing(tmp_path):
    def broken():
        yield from list(tensors().items())[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf_directory(tmp_path / "m", hf_config=CONFIG, tensors=broken(), max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_killed_write_leaves_nothing_that_loads(tmp_path):
    """Seen from inside the iterator, as after a SIGKILL: no target, and no loadable sibling."""

    def watch():
        for name, tensor in tensors().items():
            yield name, tensor
            (partial,) = tmp_path.iterdir()
            assert partial.name.startswith(".m.") and not (tmp_path / "m").exists()
            with pytest.raises(ValueError, match="no weights"):
                HFReader(partial)

    write_hf_directory(tmp_path / "m", hf_config=CONFIG, tensors=watch(), max_shard_bytes=1)


def test_taken_target_is_refused_unless_overwritten(tmp_path):
    target = tmp_path / "m"
    target.mkdir()
    write(target)
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(target, {"new": torch.ones(2)})
    assert set(HFReader(target)) == set(tensors())
    (target / "stale.txt").write_text("old")
    write(target, {"new": torch.ones(2)}, overwrite=True)
    assert set(HFReader(target)) == {"new"} and not (target / "stale.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    with pytest.raises(ValueError, match="is a file"):
        write(target / "config.json", overwrite=True)


def test_failed_overwrite_keeps_the_old_directory(tmp_path):
    write(tmp_path / "m")
    with pytest.raises(RuntimeError), new_directory(tmp_path / "m", overwrite=True):
        raise RuntimeError
    assert set(HFReader(tmp_path / "m")) == set(tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_target_taken_while_writing_is_not_clobbered(tmp_path):
    with (
        pytest.raises(ValueError, match="exists and is not empty"),
        new_directory(tmp_path / "m") as directory,
    ):
        (directory / "mine").touch()
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "theirs").touch()
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["theirs"]


def test_assets_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in (*ASSET_NAMES, "pytorch_model.bin", "README.md"):
        (source / name).write_text(f"content of {name}")
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    write(tmp_path / "m", assets_from=source)
    copied = {p.name for p in (tmp_path / "m").iterdir()}
    assert copied == {*ASSET_NAMES, "config.json", "model.safetensors"}
    assert (tmp_path / "m" / "merges.txt").read_text() == "content of merges.txt"
    assert HFReader(tmp_path / "m").generation_config == {"eos_token_id": 3}
    with pytest.raises(ValueError, match="not a directory to copy the tokenizer from"):
        write(tmp_path / "n", assets_from=tmp_path / "nowhere")


def test_writer_refuses_duplicates_and_emptiness(tmp_path):
    twice = [("a", torch.ones(1)), ("b", torch.ones(1)), ("a", torch.ones(1))]
    with pytest.raises(ValueError, match="a was written twice"):
        write_hf_directory(tmp_path / "m", hf_config=CONFIG, tensors=twice, max_shard_bytes=1)
    with pytest.raises(ValueError, match="no tensor to write"):
        write(tmp_path / "m", {})
    assert list(tmp_path.iterdir()) == []


def sharded(path):
    write(path, max_shard_bytes=200)
    index = path / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def test_reader_names_what_is_wrong_with_the_files(tmp_path):
    with pytest.raises(ValueError, match="is not a directory"):
        HFReader(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="has no weights"):
        HFReader(empty)
    (empty / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(ValueError, match="only pytorch_model-00001-of-00002.bin.*safetensors"):
        HFReader(empty)
    with pytest.raises(ValueError, match="config.json is missing"):
        save_file({"a": torch.ones(1)}, empty / "model.safetensors")
        _ = HFReader(empty).config


@pytest.mark.parametrize("keep", [0, 4, 50, -1])
def test_truncated_file(tmp_path, keep):
    write(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or was not written"):
        HFReader(tmp_path / "m")


def test_missing_shard(tmp_path):
    _, content = sharded(tmp_path / "m")
    shard = content["weight_map"]["layer.3.weight"]
    (tmp_path / "m" / shard).unlink()
    with pytest.raises(ValueError, match=f"lists {shard}, which is missing"):
        HFReader(tmp_path / "m")


def test_index_lists_a_tensor_that_no_shard_has(tmp_path):
    index, content = sharded(tmp_path / "m")
    shard = content["weight_map"]["layer.3.weight"]
    content["weight_map"]["ghost"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"places ghost in {shard}"):
        HFReader(tmp_path / "m")


def test_tensor_in_two_shards(tmp_path):
    _, content = sharded(tmp_path / "m")
    shard = tmp_path / "m" / content["weight_map"]["layer.6.weight"]
    save_file(load_file(shard) | {"layer.0.weight": torch.ones(3, 5)}, shard)
    with pytest.raises(ValueError, match="layer.0.weight is in two shards"):
        HFReader(tmp_path / "m")


def test_tensor_that_the_index_forgot_is_read(tmp_path):
    """A short index must not hide tensors: whoever checks the keys has to see them."""
    index, content = sharded(tmp_path / "m")
    del content["weight_map"]["layer.0.weight"]
    index.write_text(json.dumps(content))
    assert "layer.0.weight" in HFReader(tmp_path / "m")


def test_stale_single_file_beside_an_index(tmp_path):
    sharded(tmp_path / "m")
    save_file({"a": torch.ones(1)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match="remove the one that is stale"):
        HFReader(tmp_path / "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object, not list"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "not a file name"),
    ],
)
def test_broken_index(tmp_path, text, message):
    index, _ = sharded(tmp_path / "m")
    index.write_text(text)
    with pytest.raises(ValueError, match=message):
        HFReader(tmp_path / "m")


def test_unknown_tensor(tmp_path):
    write(tmp_path / "m")
    with pytest.raises(KeyError, match="has no tensor x"):
        HFReader(tmp_path / "m")["x"]
