#!/usr/bin/env bash
# From a fresh clone to a finished RL run on this machine's CPU. Arguments are configuration
# overrides, such as `trainer.total_steps=5`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/lib/setup_env.sh
exec .venv/bin/megatron-rl train --config scripts/recipes/quickstart-cpu.yaml "$@"
