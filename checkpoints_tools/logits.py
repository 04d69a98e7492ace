"""Two models on the same prompts, through transformers.

Bytes say whether two checkpoints are the same; logits say how far apart two are that are not, and
whether a third program understands them. FP8 weights are dequantised first: what is compared is
what the codes stand for, not the rounding of activations.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_tools.dequantize import DequantizedSource
from checkpoints_tools.source import TensorSource

_PROMPTS, _TOKENS = 4, 32


@dataclass(frozen=True, kw_only=True)
class LogitsComparison:
    """How far the log-probs of two models are apart."""

    max_difference: float
    """Largest difference of a log-prob, in nats."""
    mean_kl: float
    """Mean KL divergence of B from A over the positions, in nats."""
    same_choice: float
    """Share of positions at which both rank the same token first."""

    @property
    def is_equal(self) -> bool:
        """Whether every log-prob is the same."""
        return self.max_difference == 0

    def text(self) -> str:
        """The result for people."""
        return (
            f"log-probs of {_PROMPTS * _TOKENS} positions: largest difference "
            f"{self.max_difference:.3g} nats, mean KL {self.mean_kl:.3g}, same first choice at "
            f"{100 * self.same_choice:.1f} %"
        )


def compare_logits(a: TensorSource, b: TensorSource) -> LogitsComparison:
    """Runs both models, one after the other, on the same random token ids, in FP32.

    Raises:
        ValueError: transformers does not know the architecture, or lacks a tensor.
    """
    vocab = min(int(source.config["vocab_size"]) for source in (a, b))
    ids = torch.randint(vocab, (_PROMPTS, _TOKENS), generator=torch.Generator().manual_seed(0))
    first, second = (_log_probs(source, ids)[..., :vocab] for source in (a, b))
    return LogitsComparison(
        max_difference=float((first - second).abs().max()),
        mean_kl=float((first.exp() * (first - second)).sum(-1).mean()),
        same_choice=float((first.argmax(-1) == second.argmax(-1)).float().mean()),
    )


def _log_probs(source: TensorSource, ids: Tensor) -> Tensor:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if "quantization_config" in source.config:
        source = DequantizedSource(source, torch.float32)
    config = dict(source.config)  # not ours to change
    hf_config = AutoConfig.for_model(config.pop("model_type"), **config)
    # Not load_state_dict: transformers holds experts in other tensors than files do.
    model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)].from_pretrained(
        None,
        config=hf_config,
        state_dict={name: source[name].float() for name in source},
        dtype=torch.float32,
        output_loading_info=True,
    )
    problems = {what: sorted(map(str, names)) for what, names in info.items() if names}
    if problems:
        raise ValueError(
            f"{source.path} does not fit transformers' {type(model).__name__}: {problems}."
        )
    with torch.inference_mode():
        return model.eval()(ids).logits.float().log_softmax(-1)
