"""The endless stream of training prompts, whose order is a function of seed and position alone."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_rl.data.types import TokenizedPrompt

Prompt = TypeVar("Prompt", bound=TokenizedPrompt)


class PromptLoader(Generic[Prompt]):
    """Yields batches of prompts, epoch after epoch; batches run across the border of epochs."""

    def __init__(
        self, prompts: Sequence[Prompt], batch_size: int, seed: int, shuffle: bool
    ) -> None:
        """Starts at the first prompt of the first epoch.

        Args:
            prompts: The data set.
            batch_size: Prompts per batch.
            seed: Decides, with the epoch's number, its order.
            shuffle: Keep the data set's own order when False.

        Raises:
            ValueError: The data set is smaller than a batch.
        """
        if len(prompts) < batch_size:
            raise ValueError(
                f"data.train_batch_size={batch_size} is more than the {len(prompts)} training "
                "prompts; "
                "lower it or add prompts"
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0

    def next_batch(self) -> list[Prompt]:
        """The next ``batch_size`` prompts."""
        start, size = self._position, len(self._prompts)
        batch = []
        order: tuple[int, np.ndarray] | None = None
        for position in range(start, start + self._batch_size):
            epoch, place = divmod(position, size)
            if order is None or order[0] != epoch:
                order = epoch, self._order(epoch)
            batch.append(self._prompts[int(order[1][place])])
        self._position += self._batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return {"position": self._position, "num_prompts": len(self._prompts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position.

        Raises:
            ValueError: The data set has another size than the saved one's.
        """
        if state["num_prompts"] != len(self._prompts):
            raise ValueError(
                f"the checkpoint was made with {state['num_prompts']} training prompts and there "
                "are "
                f"{len(self._prompts)} now; restore the data, or start a run of another name"
            )
        self._position = int(state["position"])

    def _order(self, epoch: int) -> np.ndarray:
        size = len(self._prompts)
        if not self._shuffle:
            return np.arange(size)
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(size)
