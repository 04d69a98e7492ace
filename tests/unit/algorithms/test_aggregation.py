import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.aggregation import (
    AGGREGATION_MODES,
    aggregate,
    batch_totals,
    token_weights,
)

NORM_LENGTH = 11


def make_batch(seed, batch=7, length=6):
    """Values and a right-padded mask with at least one token; some rows are empty."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, length, generator=generator)
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    lengths[0] = lengths[0].clamp(min=1)
    return values, torch.arange(length) < lengths[:, None]


def literal(values, mask, mode):
    """The definitions, in loops over Python floats."""
    rows = []
    for b in range(values.shape[0]):
        row = [values[b, t].item() for t in range(values.shape[1]) if mask[b, t]]
        if row:
            rows.append(row)
    flat = [v for row in rows for v in row]
    return {
        "token-mean": lambda: sum(flat) / len(flat),
        "seq-mean-token-sum": lambda: sum(sum(row) for row in rows) / len(rows),
        "seq-mean-token-mean": lambda: sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": lambda: (
            sum(sum(row) for row in rows) / (len(rows) * NORM_LENGTH)
        ),
    }[mode]()


def whole(values, mask, mode):
    return aggregate(values, mask, mode, norm_length=NORM_LENGTH)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 6)), shuffle=st.booleans())
@settings(deadline=None, max_examples=40)
def test_any_partition_sums_to_the_same_loss_and_gradient(mode, seed, cuts, shuffle):
    values, mask = make_batch(seed)
    reference = values.clone().requires_grad_()
    loss = whole(reference, mask, mode)
    loss.backward()

    tokens, sequences = batch_totals(mask)
    order = torch.randperm(7) if shuffle else torch.arange(7)
    leaf = values.clone().requires_grad_()
    total = torch.zeros(())
    edges = [0, *sorted(cuts), 7]
    for start, stop in zip(edges, edges[1:], strict=False):
        rows = order[start:stop]
        width = max(int(mask[rows].sum(1).max()), 1)  # each micro-batch pads to its own length
        part = aggregate(
            leaf[rows, :width],
            mask[rows, :width],
            mode,
            denominator=tokens if mode == "token-mean" else sequences,
            norm_length=NORM_LENGTH,
        )
        part.backward()
        total = total + part.detach()
    torch.testing.assert_close(total, loss.detach(), rtol=1e-6, atol=1e-6)
    # A token's weight does not depend on the partition at all, so its gradient is the same bits.
    assert torch.equal(leaf.grad, reference.grad)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_agrees_with_literal_loops(mode, seed):
    values, mask = make_batch(seed)
    assert whole(values, mask, mode).item() == pytest.approx(
        literal(values, mask, mode), rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_padding_and_permutation_do_not_change_the_weights(mode):
    values, mask = make_batch(3)
    tokens, sequences = batch_totals(mask)
    totals = dict(total_tokens=tokens, total_sequences=sequences, norm_length=NORM_LENGTH)
    weights = token_weights(mask, mode, **totals)

    padded = torch.cat([mask, torch.zeros(7, 9, dtype=torch.bool)], dim=1)
    padded = torch.cat([padded, torch.zeros(2, 15, dtype=torch.bool)])
    assert batch_totals(padded) == (tokens, sequences)
    padded_weights = token_weights(padded, mode, **totals)
    assert torch.equal(padded_weights[:7, :6], weights)
    assert torch.equal(padded_weights != 0, padded)

    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(token_weights(mask[order], mode, **totals), weights[order])
    torch.testing.assert_close(whole(values[order], mask[order], mode), whole(values, mask, mode))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient(mode):
    values, mask = make_batch(5)
    dirty = values.masked_fill(~mask, float("nan")).requires_grad_()
    loss = whole(dirty, mask, mode)
    loss.backward()
    assert torch.equal(loss.detach(), whole(values, mask, mode))
    assert torch.equal(dirty.grad[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_mean_of_ones_is_one(mode):
    _, mask = make_batch(9)
    assert whole(torch.ones(mask.shape), mask, mode).item() == pytest.approx(1.0, rel=1e-6)


def test_skipped_samples_still_count():
    """Leaving out the rows whose loss is zero changes nothing, given the whole batch's totals."""
    values, mask = make_batch(11)
    values[2:5] = 0.0
    tokens, sequences = batch_totals(mask)
    rows = torch.tensor([0, 1, 5, 6])
    for mode in AGGREGATION_MODES:
        kept = aggregate(
            values[rows],
            mask[rows],
            mode,
            denominator=tokens if mode == "token-mean" else sequences,
            norm_length=NORM_LENGTH,
        )
        torch.testing.assert_close(kept, whole(values, mask, mode), rtol=1e-6, atol=1e-7)


def test_an_empty_micro_batch_adds_nothing_and_an_empty_mini_batch_is_refused():
    values, mask = torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for mode in AGGREGATION_MODES:
        assert aggregate(values, mask, mode, denominator=5, norm_length=NORM_LENGTH).item() == 0
        with pytest.raises(ValueError, match="total_.* is 0"):
            whole(values, mask, mode)


def test_dr_grpo_length_is_the_runs_and_not_the_paddings():
    mask = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="norm_length is None"):
        aggregate(torch.ones(1, 4), mask, "seq-mean-token-sum-norm")
    assert aggregate(
        torch.ones(1, 4), mask, "seq-mean-token-sum-norm", norm_length=8
    ).item() == pytest.approx(0.5)


def test_errors_name_what_was_wrong():
    mask = torch.ones(2, 3)
    with pytest.raises(ValueError, match="'mean'.*token-mean, seq-mean-token-sum"):
        aggregate(torch.ones(2, 3), mask, "mean")
    with pytest.raises(ValueError, match=r"values has shape \[2, 4\]"):
        aggregate(torch.ones(2, 4), mask, "token-mean")
    with pytest.raises(ValueError, match=r"mask has shape \[3\]"):
        aggregate(torch.ones(3), torch.ones(3), "token-mean")
