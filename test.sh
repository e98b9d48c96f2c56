#!/usr/bin/env bash
# Set-up, linters and all tests; the quick tests first, those with the real engine last. Any failure: exit code 1.
#   ./test.sh [--python INTERPRETER]      --python: use this interpreter as it is, install nothing
set -euo pipefail
cd "$(dirname "$0")"
python=.venv/bin/python
case "${1:-}" in
  "") ./setup.sh --dev ;;
  --python) python=${2:?--python needs an interpreter} ;;
  *) echo "unknown option $1; the only one is --python" >&2; exit 2 ;;
esac

failed=()
check() {
  echo "== $*" >&2
  local started=$SECONDS
  "$python" -m "$@" || failed+=("$*")
  echo "== $((SECONDS - started)) s" >&2
}

quick='not engine and not gpu'
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then quick='not engine'; fi
check ruff check .
check mypy eagle3 tiny_kimi 0*.py
check pytest -n 2 --dist worksteal -m "$quick"
check pytest -m engine

if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo 'all passed' >&2
