"""The gate: at the first step, where weights are identical, do rollout and training agree?

Policy and rollout hold the same weights when a run starts or continues, so their log-probs of the
sampled tokens differ by arithmetic alone. A mean difference above the flow's bound says that
something else is wrong: stale weights, another model, a wrong temperature, a kernel that was not
expected. It is cheapest to learn it before anything is trained.
"""

from collections.abc import Callable
from typing import Literal

import torch

from megatron_rl.metrics.gate import GateFinding, TokenDifference
from megatron_rl.trainer.batch import RolloutBatch
from megatron_rl.trainer.errors import MismatchError
from megatron_rl.trainer.update import Measured

WORST_TOKENS = 5


class MismatchGate:
    """Compares the measured log-probs of each step with what the run promises.

    The first step is compared with a bound. A run that claims exactness is watched at every later
    step too, and warns once.
    """

    def __init__(
        self,
        *,
        mode: Literal["warn", "stop", "off"],
        bound: float,
        exact: bool,
        token_text: Callable[[int], str],
        record: Callable[[GateFinding], None],
    ) -> None:
        """Prepares the gate of a run, or of a resumed one.

        Args:
            mode: ``precision.gate``.
            bound: Largest accepted mean difference at the first step, in nats.
            exact: Whether the run claims that log-probs are reproduced bit for bit.
            token_text: Text of a token id.
            record: Called with the finding of the first step, and with each warning.
        """
        self._mode = mode
        self._bound = bound
        self._exact = exact
        self._token_text = token_text
        self._record = record
        self._is_first = True
        self._has_warned = False

    @property
    def looks_first(self) -> bool:
        """Whether the next step must be inspected before its update: it may end the run."""
        return self._is_first and self._mode == "stop"

    def inspect(self, step: int, batch: RolloutBatch, measured: Measured) -> None:
        """Judges one step.

        Raises:
            MismatchError: The first step is over the bound and the mode is ``stop``.
        """
        if not measured.mask.any():
            # An overflow left no number, and the step is skipped: the next has the same weights.
            return
        is_first, self._is_first = self._is_first, False
        if self._mode == "off" or not (is_first or (self._exact and not self._has_warned)):
            return
        bound = self._bound if is_first else 0.0
        finding = find(step, batch, measured, bound, self._token_text, is_first=is_first)
        if finding.is_within:
            if is_first:
                self._record(finding)
            return
        self._has_warned = True
        self._record(finding)
        if is_first and self._mode == "stop":
            raise MismatchError(
                f"{finding.sentence()}; nothing was trained. Look at the tokens above and in "
                "gate.jsonl, or raise precision.gate_bound, or set precision.gate=warn"
            )


def find(
    step: int,
    batch: RolloutBatch,
    measured: Measured,
    bound: float,
    token_text: Callable[[int], str],
    *,
    is_first: bool,
) -> GateFinding:
    """Compares one step with a bound; names the worst tokens where it is exceeded."""
    difference = (measured.logprobs.double() - batch.rollout_logprobs.double()).abs()
    difference = difference.masked_fill(~measured.mask, 0.0)
    mean = float(difference.sum() / measured.mask.sum())
    # NaN is within no bound.
    is_within = mean <= bound
    return GateFinding(
        step=step,
        is_first=is_first,
        mean=mean,
        max=float(difference.max()),
        bound=bound,
        is_within=is_within,
        worst=() if is_within else _worst(step, batch, measured, difference, token_text),
    )


def _worst(
    step: int,
    batch: RolloutBatch,
    measured: Measured,
    difference: torch.Tensor,
    token_text: Callable[[int], str],
) -> tuple[TokenDifference, ...]:
    order = difference.flatten().sort(descending=True, stable=True).indices
    tokens = []
    for index in order[:WORST_TOKENS].tolist():
        row, position = divmod(index, batch.shape[1])
        if not difference[row, position] != 0:
            break
        completion = batch.completions[row]
        token_id = completion.token_ids[position]
        tokens.append(
            TokenDifference(
                step=step,
                prompt_index=completion.prompt_index,
                sample_index=completion.sample_index,
                position=position,
                token_id=token_id,
                text=token_text(token_id),
                train_logprob=measured.logprobs[row, position].item(),
                rollout_logprob=batch.rollout_logprobs[row, position].item(),
            )
        )
    return tuple(tokens)
