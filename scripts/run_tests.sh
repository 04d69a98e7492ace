#!/usr/bin/env bash
# Every check that needs no GPU: linters, types, then the tests.
#
#   scripts/run_tests.sh [--full] [pytest arguments]
#
# --full also runs the tests marked slow. A linter's failure is reported and the rest still runs;
# the exit status is non-zero at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection="not slow and not gpu"
if [[ ${1:-} == --full ]]; then
  selection="not gpu"
  shift
fi
scripts/lib/setup_env.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
PATH=$PWD/.venv/bin:$PATH

failed=()
# check TITLE COMMAND...: shows the command's output only where it fails.
check() {
  local title=$1 start=$SECONDS output
  shift
  if output=$("$@" 2>&1); then
    printf '==> %s: ok, %d s\n' "$title" $((SECONDS - start))
  else
    printf '%s\n==> %s: FAILED, %d s\n' "$output" "$title" $((SECONDS - start))
    failed+=("$title")
  fi
}

mapfile -t shell_scripts < <(
  find .ci scripts -type f \( -name '*.sh' -o -name '*.sbatch' -o -path .ci/run \) | sort
)
check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy megatron_rl/config megatron_rl/precision megatron_rl/algorithms
check "shellcheck" shellcheck "${shell_scripts[@]}"
check "shfmt" shfmt -d -i 2 -ci "${shell_scripts[@]}"
[[ ! -f Dockerfile ]] || check "hadolint" hadolint Dockerfile

status=0
python -m pytest -m "$selection" "$@" || status=$?
if ((${#failed[@]})); then
  printf '==> FAILED: %s\n' "${failed[@]}" >&2
  ((status)) || status=1
fi
exit "$status"
