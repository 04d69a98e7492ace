"""What the commands that write a model have in common: the plan on a dry run, and the progress."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkpoints_tools.hf_writer import plan_shards, write_planned
from checkpoints_tools.pieces import served_pieces
from checkpoints_tools.progress import Progress, format_bytes
from checkpoints_tools.safetensors_writer import Piece
from checkpoints_tools.source import CastSource, TensorSource
from megatron_rl.precision import resolve_flow


def cast(source: TensorSource, dtype: str | None) -> TensorSource:
    """A source in the dtype that the user asked for, if any."""
    return CastSource(source, getattr(torch, dtype)) if dtype else source


def write_hf(
    arguments: argparse.Namespace,
    source: TensorSource,
    pieces: Sequence[Piece],
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> None:
    """Write a Hugging Face directory as the arguments of `options.add_writing` say, or print it."""
    nbytes = sum(piece.nbytes for piece in pieces)
    if arguments.dry_run:
        count = sum(len(piece.tensors) for piece in pieces)
        files = len(plan_shards(pieces, arguments.max_shard_bytes))
        print(f"{arguments.target}: {count} tensors, {format_bytes(nbytes)} in {files} files")
        print("\n".join([*notes, "dry run: nothing was written"]))
        return
    with Progress(f"writing {arguments.target}", nbytes, quiet=arguments.quiet) as progress:
        write_planned(
            arguments.target,
            hf_config=config,
            pieces=pieces,
            assets_from=source.asset_directory,
            max_shard_bytes=arguments.max_shard_bytes,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
            on_bytes=progress,
        )
    print("\n".join([str(arguments.target), *notes]))


def write_served(arguments: argparse.Namespace, source: TensorSource) -> None:
    """Write codes and scales as the arguments of `options.add_flow` and `add_writing` say."""
    flow = resolve_flow(arguments.flow)
    pieces, config, plan = served_pieces(source, flow, tp_size=arguments.tp)
    write_hf(arguments, source, pieces, config, [f"{flow.name}: {plan.summary()}"])
