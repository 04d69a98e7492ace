"""What a run says of its flow in every header: console, ``env.json``, report."""

from dataclasses import dataclass

from megatron_rl.config import RunConfig
from megatron_rl.config.sft import SFTConfig
from megatron_rl.models import ModelSpec, linear_plan, parameter_map
from megatron_rl.platforms import cpu_isa, current_platform
from megatron_rl.precision import PrecisionFlow
from megatron_rl.precision.bounds import flow_bound
from megatron_rl.precision.contract import contract, mismatch_statement
from megatron_rl.precision.exactness import Exactness, exactness


@dataclass(frozen=True, kw_only=True)
class FlowStatus:
    """The flow of a run, on its platform and layout."""

    flow: PrecisionFlow
    exactness: Exactness | None
    """What is promised of log-probs; None for a run that trains on no samples."""
    quantised: str | None
    """Which linear layers are quantised; None for a flow that quantises none."""
    mismatch: str | None
    """``MISMATCHED: ...`` where rollout computes in other formats than training."""

    def header(self) -> str:
        """Lines of the console's header."""
        lines = [
            self.mismatch,
            self.flow.short_str(),
            self.quantised and f"quantised: {self.quantised}",
            self.exactness and self.exactness.statement(),
        ]
        return "\n".join(line for line in lines if line)

    def environment(self) -> dict[str, str]:
        """Entries of ``env.json``."""
        entries = {
            "flow": self.flow.name,
            "flow_summary": self.flow.short_str().partition(" ")[2].strip("()"),
            "flow_quantised": self.quantised,
            "flow_exactness": self.exactness and self.exactness.statement(),
            "flow_mismatch": self.mismatch,
        }
        return {key: value for key, value in entries.items() if value}


def flow_status(config: RunConfig | SFTConfig, flow: PrecisionFlow, spec: ModelSpec) -> FlowStatus:
    """The status of a run's flow; starts nothing.

    Raises:
        ValueError: The flow can quantise no layer of the model.
    """
    quantises = flow.trains_quantised or flow.serves_quantised
    plan = linear_plan(parameter_map(spec), flow) if quantises else None
    return FlowStatus(
        flow=flow,
        exactness=run_exactness(config, flow) if isinstance(config, RunConfig) else None,
        quantised=None if plan is None else plan.summary(),
        mismatch=mismatch_statement(contract(flow, platform=current_platform().name)),
    )


def run_exactness(config: RunConfig, flow: PrecisionFlow) -> Exactness:
    """What the run promises of its log-probs, on this machine."""
    platform = current_platform().name
    return exactness(
        flow,
        platform=platform,
        train_tp=config.policy.tensor_model_parallel_size,
        rollout_tp=config.rollout.tensor_parallel_size,
        sequence_parallel=config.policy.sequence_parallel,
        cpu_isa=cpu_isa() if platform == "cpu" else None,
    )


def gate_bound(config: RunConfig, flow: PrecisionFlow) -> float:
    """Largest accepted mean difference at the first step: the user's, or the flow's own."""
    if config.precision.gate_bound is not None:
        return config.precision.gate_bound
    return flow_bound(flow, exact=run_exactness(config, flow).claimed)
