"""Each tensor of a checkpoint is read once per machine, however many ranks the machine has.

The ranks of a machine form a group. Its first rank reads an entry of the parameter map and sends it
to the others, which never touch the file. On a network file system that is a machine's whole
traffic divided by its ranks; memory-mapping the file in every rank would share pages as well, but
only while the page cache holds a tensor until the slowest rank has used it, and not between
containers.

Every rank of the group receives every entry, also one that only another pipeline stage holds:
inside a machine sending is cheap beside reading, and one group with one order of entries cannot
deadlock. An entry that no rank of the machine holds is not read there at all.
"""

import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_rl.models.entry import ParameterEntry


class NodeReader:
    """Full parameters from Hugging Face tensors; all ranks of a machine read in step."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        wanted: Collection[str],
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Agrees with the other ranks of the machine on what is read.

        Args:
            tensors: Lazy mapping from name to tensor; asked on the group's first rank only.
            wanted: Megatron names of the entries that this rank needs.
            group: Ranks of this machine; None for a rank that is alone.
            device: Where entries are sent from and to.
            dtype: Of the parameters, whose range the values must fit.
        """
        self._tensors = tensors
        self._group = group
        self._device = device
        self._dtype = dtype
        self._wanted = set(wanted)
        if group is not None:
            of_ranks: list[set[str]] = [set() for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(of_ranks, self._wanted, group=group)
            self._wanted = set().union(*of_ranks)

    def read(self, entry: ParameterEntry) -> torch.Tensor | None:
        """The full parameter, or None where no rank of the machine needs it.

        A collective of the machine's ranks. The tensor may be a view of the file.

        Raises:
            ValueError: A tensor is missing, misshapen, out of the dtype's range, or holds NaN or
                Inf. It is raised on every rank of the machine, as is any other fault of the
                reading rank.
            OSError: The file could not be read.
            RuntimeError: Another fault of the reading rank.
        """
        if entry.megatron_name not in self._wanted:
            return None
        if self._group is None:
            return _checked(entry, self._tensors, self._dtype)
        source = dist.get_global_rank(self._group, 0)
        is_reader = dist.get_rank() == source
        full, fault = None, None
        if is_reader:
            try:
                full = _checked(entry, self._tensors, self._dtype).to(self._device).contiguous()
            except Exception as error:  # sent to those who wait, then raised
                fault = error
        head = [None if full is None else full.dtype, None if fault is None else _described(fault)]
        dist.broadcast_object_list(head, src=source, group=self._group)
        dtype, description = head
        if fault is not None:
            raise fault
        if description is not None:
            kind, message = description
            raise kind(message)
        if full is None:
            full = torch.empty(entry.shape, dtype=dtype, device=self._device)
        # As bytes: backends differ in the dtypes that they know.
        dist.broadcast(full.view(torch.uint8), src=source, group=self._group)
        return full


@contextmanager
def node_group() -> Iterator[dist.ProcessGroup | None]:
    """The ranks of this machine as a process group; None for a rank that is alone on it.

    A collective of all ranks, on entering and on leaving.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        yield None
        return
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, _machine())
    ours: dist.ProcessGroup | None = None
    for ranks in ranks_by_machine(names):
        if len(ranks) == 1:
            continue
        # Every rank takes part in making each group.
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            ours = group
    try:
        yield ours
    finally:
        if ours is not None:
            dist.destroy_process_group(ours)


def ranks_by_machine(names: Sequence[str]) -> list[list[int]]:
    """Ranks of each machine, in order of its first rank.

    Args:
        names: The machine of each rank.
    """
    machines: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        machines.setdefault(name, []).append(rank)
    return list(machines.values())


def _machine() -> str:
    # Two launchers on one host, in containers of equal name at worst, only read twice.
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _checked(
    entry: ParameterEntry, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    full = entry.to_megatron(tensors)
    # A sum is finite only if every term is, and costs one read.
    if not torch.isfinite(full.sum(dtype=torch.float32)):
        raise ValueError(f"{', '.join(entry.hf_names)} holds NaN or Inf; the checkpoint is damaged")
    if dtype == torch.float16 and full.abs().amax() > torch.finfo(dtype).max:
        raise ValueError(
            f"{', '.join(entry.hf_names)} exceeds 65504, the largest number of FP16; train this "
            "model with precision.flow=bf16"
        )
    return full


def _described(fault: Exception) -> tuple[type[Exception], str]:
    """A fault as the other ranks raise it: its own type need not survive a pickle."""
    for kind in (ValueError, OSError):
        if isinstance(fault, kind):
            return kind, str(fault)
    return RuntimeError, f"{type(fault).__name__}: {fault}"
