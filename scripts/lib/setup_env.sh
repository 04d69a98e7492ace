#!/usr/bin/env bash
# Makes .venv: Python 3.11 or 3.12, torch, the locked CPU environment, and this project (editable).
#
# A finished environment carries a stamp: the hash of what it was made from. While the hash holds,
# this script does nothing; when the lock, setup.cfg or the Python changes, it updates. An
# interrupted run leaves a marker instead, and the next run starts that environment afresh.
#
# Variables:
#   PYTHON                  the interpreter to use (default: .venv's own, python3.11, python3.12)
#   MEGATRON_RL_TORCH_SPEC  pip's arguments for torch (default: torch==2.13.0)
# pip's own configuration (PIP_INDEX_URL, pip.conf, ...) is honoured, for uv too.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
venv=.venv
stamp=$venv/.megatron_rl_stamp
marker=$venv/.megatron_rl_incomplete
log=$venv/.megatron_rl_setup.log
torch_spec=${MEGATRON_RL_TORCH_SPEC:-torch==2.13.0}
read -r -a torch_words <<<"$torch_spec" # it may carry options, such as an index

die() {
  printf 'setup_env: %s\n' "$*" >&2
  exit 1
}

# step TITLE COMMAND...: runs quietly; prints the title, the seconds, and on failure the log's tail.
step() {
  local title=$1 start=$SECONDS
  shift
  printf '==> %s ...\n' "$title"
  if ! "$@" >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    die "\"$title\" failed after $((SECONDS - start)) s (its output is above; all of it: $root/$log)."
  fi
  printf '==> %s: %d s\n' "$title" $((SECONDS - start))
}

# The interpreter behind $1, outside any virtual environment; fails unless it is 3.11 or 3.12.
base_python() {
  "$1" -I -c 'import sys
if sys.version_info[:2] not in ((3, 11), (3, 12)): sys.exit(1)
print(sys._base_executable)' 2>/dev/null
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    base_python "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 or 3.12."
    return
  fi
  for candidate in "$venv/bin/python" python3.11 python3.12 python3; do
    base_python "$candidate" && return
  done
  die "found neither python3.11 nor python3.12 on PATH. Install one, or set PYTHON=/path/to/python3.11."
}

full_version() { "$1" -IS -c 'import platform; print(platform.python_version())' 2>/dev/null; }

# reasoning-gym needs pycosat, a C extension that is published as source only.
check_compiler() {
  local compiler header
  "$1" -Ic 'import venv, ensurepip' 2>/dev/null ||
    die "$1 cannot make virtual environments; install its venv package (Debian: python3.X-venv)."
  compiler=${CC:-$("$1" -Ic 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}
  command -v "${compiler%% *}" >/dev/null ||
    die "no C compiler (${compiler%% *}), which pycosat needs; install gcc (Debian: build-essential)."
  header=$("$1" -Ic 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [[ -f $header ]] ||
    die "$header is missing, which pycosat needs; install the Python headers (Debian: python3.X-dev)."
}

# pip's index settings as uv arguments, one a line. uv reads none of them itself; like pip it is to
# take the best version over all indexes.
uv_index_arguments() {
  "$venv/bin/pip" config list 2>/dev/null | "$venv/bin/python" -Ic '
import ast, sys
options = {"index-url": "--index-url", "extra-index-url": "--extra-index-url",
           "find-links": "--find-links", "trusted-host": "--allow-insecure-host"}
settings = {}
for line in sys.stdin:
    section, _, rest = line.partition(".")
    name, _, value = rest.partition("=")
    if section in ("global", "install", ":env:"):
        settings[section, name] = ast.literal_eval(value.strip())
for name in [*options, "no-index"]:  # the environment wins over [install], which wins over [global]
    found = [settings[s, name] for s in (":env:", "install", "global") if (s, name) in settings]
    for value in found[0].split() if found else []:
        if name in options:
            print(options[name], value, sep="\n")
        elif value.lower() in ("1", "true", "yes", "on"):
            print("--no-index")
print("--index-strategy", "unsafe-best-match", sep="\n")'
}

# install_exactly ARGUMENTS...: exactly what is named, through uv. Where uv is missing or fails (an index
# only pip can read), through pip, which must not trust what a failed uv left behind.
install_exactly() {
  local -a reinstall=()
  if [[ -x $venv/bin/uv ]]; then
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps "${uv_index[@]}" "$@" && return
    echo "uv failed; trying pip."
    reinstall=(--force-reinstall)
  fi
  "$venv/bin/pip" install --no-deps "${reinstall[@]}" "$@"
}

# True for a .venv that cannot be updated in place. Scripts in .venv/bin name their interpreter by
# its full path, so an environment does not survive a move or a copy of the tree.
must_start_afresh() {
  [[ -f $marker || $(full_version "$venv/bin/python") != "$version" ]] && return
  [[ -f $venv/bin/pip ]] && ! head -n 2 "$venv/bin/pip" | grep -qF "$root/$venv/"
}

[[ $(uname -sm) == "Linux x86_64" ]] ||
  die "the locked environment is for Linux x86_64, this is $(uname -sm). Install by hand: pip install -e ."

# One at a time: a second caller waits here for the first. The lock is on this script's own file.
exec 9<"${BASH_SOURCE[0]}"
if ! flock --nonblock 9; then
  echo "==> Waiting for another setup_env in this tree"
  flock 9
fi

python=$(find_python)
version=$(full_version "$python")
minor=${version%.*}
lock=requirements/cpu-py${minor/./}.lock
fingerprint=$(
  {
    echo "$root $version $torch_spec"
    cat "$lock" setup.cfg pyproject.toml
  } | sha256sum | cut -d' ' -f1
)
if [[ -f $stamp && $(<"$stamp") == "$fingerprint" ]] &&
  [[ $(full_version "$venv/bin/python") == "$version" ]]; then
  exit 0
fi

[[ -f $marker || -f $venv/pyvenv.cfg || -z $(ls -A "$venv" 2>/dev/null) ]] ||
  die "$root/$venv exists and is not a virtual environment. Move it away."

if [[ -f $venv/pyvenv.cfg ]] && must_start_afresh; then
  echo "==> Emptying $venv (unfinished, moved, or made with another Python)"
fi
mkdir -p "$venv"
if must_start_afresh; then
  check_compiler "$python"
  touch "$marker"
  find "$venv/" -mindepth 1 ! -path "$marker" -delete
  echo "==> Making $venv with Python $version (once; 3 to 7 GB, a few minutes)"
fi
touch "$marker"
rm -f "$stamp"

[[ -x $venv/bin/pip ]] || step "Virtual environment" "$python" -m venv "$venv"
step "$torch_spec" "$venv/bin/pip" install "${torch_words[@]}"
"$venv/bin/pip" install --quiet "$(grep '^uv==' "$lock")" >"$log" 2>&1 ||
  echo "==> uv cannot be installed here: using pip, which is slower"
mapfile -t uv_index < <(uv_index_arguments)
if certificates=$("$venv/bin/pip" config get :env:.cert 2>/dev/null) ||
  certificates=$("$venv/bin/pip" config get global.cert 2>/dev/null); then
  export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificates}
fi
step "$lock" install_exactly -r "$lock"
# The lock's setuptools builds the project, so this needs no network.
step "megatron-rl, editable" install_exactly --no-build-isolation -e .
rm -f "$marker"
step "Import check (torch, vLLM, Megatron-core, transformers, reasoning-gym)" \
  "$venv/bin/python" -c 'import torch, vllm, megatron.core, transformers, reasoning_gym'

printf '%s\n' "$fingerprint" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$log"
echo "==> $venv is ready: $SECONDS s"
