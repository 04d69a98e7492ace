"""The dynamic loss scale of an FP16 policy: Megatron's scaler, and when a run gives up.

FP16 has no number below 6e-8 and none above 65504. The loss is therefore multiplied by a scale
before the backward pass, and the FP32 gradients are divided by it once, before their norm is taken.
An overflow anywhere in them skips the optimizer step and lowers the scale; a long stretch without
one raises it (arXiv 1710.03740).

A forward pass can overflow too: an activation beyond 65504 makes the loss NaN or infinite. No scale
cures that, but it may be one step's batch, so it counts as an overflow like any other, and a policy
that has left FP16's range for good ends at the floor.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.precision import LossScale


class DynamicLossScale:
    """The scale of one optimizer; its state is the same on every rank."""

    def __init__(self, config: LossScale, optimizer: Any) -> None:
        """Takes over the scaler that Megatron built for the optimizer."""
        scalers = list(_grad_scalers(optimizer))
        assert len(scalers) == 1, "several optimizers would scale one loss differently"
        self._config = config
        self._scaler = scalers[0]
        # Megatron has no option for it and always halves.
        self._scaler.backoff_factor.fill_(config.backoff)
        self._overflows_at_floor = 0

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self._scaler.scale.item())

    def step(self, optimizer: Any, *, loss_is_finite: bool) -> float | None:
        """One optimizer step on the scaled gradients, unless something overflowed.

        Args:
            optimizer: Megatron's; it unscales, checks, and adapts the scale.
            loss_is_finite: Whether the forward pass stayed within FP16's range.

        Returns:
            The norm of the unscaled gradients before clipping, or None when the step was skipped:
            weights and moments are then as before.

        Raises:
            NonFiniteError: The scale stands at its floor, and the last steps have all overflowed.
        """
        was_at_floor = bool((self._scaler.scale <= self._scaler.min_scale).item())
        if loss_is_finite:
            success, grad_norm, _ = optimizer.step()
            if success:
                self._overflows_at_floor = 0
                return float(grad_norm)
        else:
            self._scaler.update(True)
        self._overflows_at_floor = self._overflows_at_floor + 1 if was_at_floor else 0
        if self._overflows_at_floor >= self._config.max_steps_at_floor:
            what = "the gradients" if loss_is_finite else "the forward pass"
            raise NonFiniteError(
                f"{what} exceeded the range of FP16, the last of {self._overflows_at_floor} "
                f"overflows in a row with the loss scale at its floor of {self.scale:g} "
                "(precision.flow=bf16 has the range of FP32)"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """What Megatron's scaler does not save with the optimizer."""
        return {"overflows_at_floor": self._overflows_at_floor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; the optimizer restores the scaler itself."""
        self._overflows_at_floor = int(state["overflows_at_floor"])


def _grad_scalers(optimizer: Any) -> Iterator[DynamicGradScaler]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.grad_scaler, DynamicGradScaler):
            yield part.grad_scaler
