"""Planned writing: what comes out is a plain safetensors model, whole or not at all."""

import hashlib
import json
import os
import stat
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoints_tools.hf import HFReader, ready
from checkpoints_tools.hf_writer import plan_shards, write_planned
from checkpoints_tools.manifest import MANIFEST, check_manifest, write_manifest
from checkpoints_tools.safetensors_writer import DTYPES, Piece, PlannedTensor, write_safetensors
from megatron_rl.models.layout import same_bits

CONFIG = {"architectures": ["LlamaForCausalLM"]}
Usage = namedtuple("Usage", "total used free")


def tensors(shapes_and_dtypes):
    generator = torch.Generator().manual_seed(0)
    return {
        f"t{i}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(shapes_and_dtypes)
    }


def pieces_of(given):
    return [ready(name, tensor) for name, tensor in given.items()]


shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(shape, st.sampled_from(list(DTYPES.values()))), min_size=1, max_size=12))
def test_any_mixture_of_shapes_and_dtypes_reads_back(tmp_path_factory, mixture):
    file = tmp_path_factory.mktemp("m") / "a.safetensors"
    given = tensors(mixture)
    sha256 = write_safetensors(file, pieces_of(given))
    assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    read = load_file(file)
    assert set(read) == set(given)
    assert all(
        read[name].shape == tensor.shape and same_bits(read[name], tensor)
        for name, tensor in given.items()
    )
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_only_one_piece_is_held(tmp_path):
    alive = []

    def piece(i):
        def make():
            assert not any(ref() is not None for ref in alive), "an earlier piece was kept"
            array = np.full((10, 10), float(i))
            alive.append(weakref.ref(array))
            return [(f"t{i}", torch.from_numpy(array))]

        planned = PlannedTensor(name=f"t{i}", shape=(10, 10), dtype=torch.float64)
        return Piece(tensors=(planned,), make=make)

    write_safetensors(tmp_path / "a.safetensors", [piece(i) for i in range(6)])
    assert len(alive) == 6


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("max_shard_bytes", [1, 100, 10**9])
def test_directory_is_the_same_for_any_number_of_workers(tmp_path, workers, max_shard_bytes):
    given = tensors([((3 + i, 5), torch.bfloat16) for i in range(9)])
    done = []
    write_planned(
        tmp_path / "m",
        hf_config=CONFIG,
        pieces=pieces_of(given),
        max_shard_bytes=max_shard_bytes,
        workers=workers,
        on_bytes=done.append,
    )
    reader = HFReader(tmp_path / "m")
    assert set(reader) == set(given) and reader.config == CONFIG
    assert all(same_bits(reader[name], tensor) for name, tensor in given.items())
    assert sum(done) == sum(tensor.nbytes for tensor in given.values())
    assert check_manifest(tmp_path / "m")
    umask = os.umask(0)
    os.umask(umask)
    for file in (tmp_path / "m").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    shards = list((tmp_path / "m").glob("*.safetensors"))
    expected = plan_shards(pieces_of(given), max_shard_bytes)
    assert len(shards) == len(expected)


def test_pieces_stay_whole_and_files_within_their_size():
    pair = tuple(PlannedTensor(name=n, shape=(4,), dtype=torch.float32) for n in ("a", "a_scale"))
    single = PlannedTensor(name="b", shape=(4,), dtype=torch.float32)
    pieces = [Piece(tensors=pair, make=list), Piece(tensors=(single,), make=list)]
    assert plan_shards(pieces, 48) == [pieces]
    assert plan_shards(pieces, 47) == plan_shards(pieces, 1) == [[pieces[0]], [pieces[1]]]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_failure_in_one_shard_leaves_nothing_and_is_what_is_raised(tmp_path, workers, error):
    def fail():
        raise error("from the source")

    planned = PlannedTensor(name="bad", shape=(5,), dtype=torch.float32)
    pieces = pieces_of(tensors([((50, 50), torch.float32)] * 6))
    pieces.insert(3, Piece(tensors=(planned,), make=fail))
    with pytest.raises(error, match="from the source"):
        write_planned(
            tmp_path / "m", hf_config=CONFIG, pieces=pieces, max_shard_bytes=1, workers=workers
        )
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_writing_leaves_nothing(tmp_path):
    def interrupt(nbytes):
        raise KeyboardInterrupt

    pieces = pieces_of(tensors([((5, 5), torch.float32)]))
    with pytest.raises(KeyboardInterrupt):
        write_planned(tmp_path / "m", hf_config=CONFIG, pieces=pieces, on_bytes=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(10**9, 10**9, 10**6))

    def never():
        raise AssertionError("a tensor was read")

    planned = PlannedTensor(name="t", shape=(25, 10**8), dtype=torch.float32)
    with pytest.raises(OSError, match="would take 10 GB.*has only 1 MB free"):
        write_planned(
            tmp_path / "parent" / "m",
            hf_config=CONFIG,
            pieces=[Piece(tensors=(planned,), make=never)],
        )
    assert list(tmp_path.iterdir()) == []


def test_duplicates_and_emptiness_are_refused(tmp_path):
    pieces = pieces_of(tensors([((1,), torch.float32)])) * 2
    with pytest.raises(ValueError, match="t0 was to be written twice"):
        write_planned(tmp_path / "m", hf_config=CONFIG, pieces=pieces)
    with pytest.raises(ValueError, match="no tensor to write"):
        write_planned(tmp_path / "m", hf_config=CONFIG, pieces=[])
    assert list(tmp_path.iterdir()) == []


def test_manifest_finds_every_accident(tmp_path):
    assert not check_manifest(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_text("content")
    (tmp_path / "sub" / "b").write_text("more")
    write_manifest(tmp_path, content={"kind": "weights"})
    content = json.loads((tmp_path / MANIFEST).read_text())
    assert content["kind"] == "weights" and set(content["files"]) == {"a", "sub/b"}
    assert check_manifest(tmp_path)
    (tmp_path / "later").write_text("a file that was added is nobody's business")
    assert check_manifest(tmp_path)
    (tmp_path / "a").write_text("c0ntent")
    with pytest.raises(ValueError, match="a is not what was written: its checksum differs"):
        check_manifest(tmp_path)
    (tmp_path / "a").write_text("short")
    with pytest.raises(ValueError, match="a has 5 bytes, but 7 were written"):
        check_manifest(tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match="lists a, which is missing"):
        check_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"files": {"a": 3}}')
    with pytest.raises(ValueError, match="is damaged"):
        check_manifest(tmp_path)
