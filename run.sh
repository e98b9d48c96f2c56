#!/usr/bin/env bash
# Set-up and the whole pipeline on one machine, by default on the embedded model (SmolLM2-135M). The same command
# again goes on where this one stopped.
#   ./run.sh [--python INTERPRETER] [--model FOLDER_OR_GGUF] [--run-dir DIR] [--config FILE]
#     --python   use this interpreter as it is, install nothing (default: .venv, made by setup.sh)
#     --model    folder of the verifier, or a .gguf file, which is converted (default: the configuration's)
#     --run-dir  default runs/smollm2-135m
#     --config   default configs/smollm2-135m.yaml
# The exit code is that of the stage that failed.
set -euo pipefail
project=$(cd "$(dirname "$0")" && pwd)
say() { printf '[run] %s\n' "$*" >&2; }
# Paths are the caller's; symbolic links stay, since a virtual environment's interpreter is one.
path() { realpath -ms --relative-base="$project" -- "$1"; }

python= model= run_dir=runs/smollm2-135m config=configs/smollm2-135m.yaml
while (($#)); do
  case "$1" in
    -h | --help) sed -n '2,/^set/{/^# /s/^# //p}' "$0"; exit 0 ;;
    --python | --model | --run-dir | --config) (($# > 1)) || { say "$1 needs a value"; exit 2; } ;;&
    --python) python=$(command -v -- "$2") || { say "no such interpreter: $2"; exit 3; }
              python=$(realpath -ms -- "$python") ;;
    --model) model=$(path "$2") ;;
    --run-dir) run_dir=$(path "$2") ;;
    --config) config=$(path "$2") ;;
    *) say "unknown option $1; ./run.sh --help lists them"; exit 2 ;;
  esac
  shift 2
done
cd "$project"

# Run a stage such that Ctrl-C and kill reach it and its exit code comes back. bash hands a signal on only while it
# waits for a background job, and gives such jobs no Ctrl-C unless they ask for it.
stage() {
  local code=0
  (trap - INT; exec "$python" "$@") &
  child=$!
  trap 'kill -TERM $child 2>/dev/null || true' TERM
  trap : INT  # the terminal sends it to the stage as well
  while wait $child && code=0 || code=$?; kill -0 $child 2>/dev/null; do :; done
  trap - INT TERM
  return $code
}

if [[ -z "$python" ]]; then
  ./setup.sh
  python=$project/.venv/bin/python
fi

if [[ "$model" == *.gguf ]]; then
  folder=models/$(basename "$model" .gguf)
  stage -m eagle3.embedded --gguf "$model" --out "$folder"
  model=$folder
elif [[ -z "$model" ]] && grep -q 'models/smollm2-135m' "$config"; then
  stage -m eagle3.embedded --out models/smollm2-135m
elif [[ -z "$model" ]] && grep -q 'models/tiny-kimi' "$config"; then
  stage -m tiny_kimi.model --out models/tiny-kimi
fi

common=(--config "$config" --run-dir "$run_dir")
[[ -z "$model" ]] || common+=(--model "$model")
for script in 0[1-6]_*.py; do
  arguments=("${common[@]}")
  [[ $script != 01_* ]] || arguments+=(--serve)
  started=$SECONDS code=0
  stage "$script" "${arguments[@]}" || code=$?
  say "$script: exit code $code after $((SECONDS - started)) s"
  ((code == 0)) || exit $code
done
say "report: $run_dir/06_bench/report.html"
