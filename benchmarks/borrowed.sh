#!/usr/bin/env bash
# A session on a borrowed GPU machine that has PyTorch but no network, in stages:
#   at home    benchmarks/borrowed.sh pack DATA       what is missing there, into carry/ (which git ignores)
#   there      COMMIT=… OUT=… benchmarks/borrowed.sh keep tests arms record:cifar10-94:5:2 …
# Every stage ends in a file under $OUT; what a cut-off stage had measured is there too. MORE: settings for every run.
set -euo pipefail
cd "$(dirname "$0")/.."
KEPT=${KEPT:-/tmp/kept} OUT=${OUT:-out} PYTHON=${PYTHON:-python}
export PYTHONPATH="$KEPT/packages:src:." PYTHONUNBUFFERED=1 VITASCOPE_DATA=${VITASCOPE_DATA:-$KEPT/data}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$KEPT/compiled}
[[ "${COMMIT:-0000000}" =~ ^[0-9a-f]{7,40}$ ]] || { echo "COMMIT=$COMMIT is no commit"; exit 2; }
[ -z "${COMMIT:-}" ] || export GIT_DIR=/nowhere  # what is said holds, not what a copy of the tree makes git say
SEED=${SEED:-21}  # the first of those that are recorded; never tuned on
PURE="omegaconf optuna alembic mako colorlog sqlalchemy"  # packages without compiled parts

pack() {  # carry/1, carry/2 and carry/3 are small enough for a journey each; 1 has what does without CIFAR-10
  mkdir -p carry/1/data carry/2/data/cifar10 carry/3/data/cifar10
  "$PYTHON" -m pip install --quiet --upgrade --no-deps --no-compile --only-binary :all: --platform any \
    --implementation py --python-version "${THERE:-3.12}" --target carry/packages $PURE
  tar -czf carry/1/packages.tar.gz -C carry packages && rm -r carry/packages
  cp -r "$1/mnist" "$1"/weights/*.safetensors "$1/unpack.py" carry/1/data
  cp "$1"/cifar10/*-a.npz carry/2/data/cifar10 && cp "$1"/cifar10/*-b.npz carry/3/data/cifar10
  chmod -R u+w carry && du -sh carry/*
}

keep() {  # after each journey; with both halves there CIFAR-10 is unpacked
  mkdir -p "$KEPT" && cp -r carry/*/. "$KEPT"
  [ -d "$KEPT/packages" ] || tar -xzf "$KEPT/packages.tar.gz" -C "$KEPT"
  if [ "$(ls "$KEPT/data/cifar10" 2>/dev/null | wc -l)" = 2 ]; then
    "$PYTHON" "$KEPT/data/unpack.py" "$KEPT/data/cifar10.npz"
  fi
}

tests() {  # torch's own deprecations differ from version to version
  "$PYTHON" -m pytest -q -o addopts= -W ignore::DeprecationWarning tests/kernels tests/training/test_kernel_choice.py \
    | tee "$OUT/tests.log"
}

arms() {  # ARMS: their names, one a line; TUNED: seeds that are not recorded; VIEWS: 1, 2, 6 or 10; CALLED: the name of the recipe with MORE
  local -a names=()
  mapfile -t names <<<"${ARMS:?which arms of benchmarks/speedrun.py, one a line}"
  "$PYTHON" -m benchmarks.speedrun --recipe "${RECIPE:-cifar10-94}" ${DATA:+--data "$DATA"} --views ${VIEWS:-2} \
    --arms "${names[@]}" --seeds ${TUNED:-101} --set ${MORE:-} --called "${CALLED:-unchanged}" --compile "${COMPILE:-always}" \
    --out "$OUT/speedrun-${RECIPE:-cifar10-94}.json" --runs "$KEPT/tuned" ${COMMIT:+--commit "$COMMIT"} ${GO_ON:+--go-on "$GO_ON"}
}

parts() {  # every part of a fast recipe taken back, alone: all arms of one seed before the next, so a cut leaves pairs
  ARMS="unchanged
timm's initialization
no whitening
random flips
no EMA
AdamW instead of Muon
no QK-norm
GELU
class token
stochastic depth 0.1
shift filled with zeros
no colour changes
CutMix on 25 % of images
no label smoothing
batch of 1000
with all biases
gradients clipped at 1" TUNED=${TUNED:-101 102 103} arms
}

record() {  # RECIPE:SEEDS:VIEWS (1, 2, 6 or 10); written after every seed. Nothing is compiled before the first, so its cold time is one
  TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) "$PYTHON" - "$KEPT/runs" "$OUT" "${COMMIT:-}" "$SEED" "$@" \
    data.validation=0 "train.compile=${COMPILE:-always}" ${MORE:-} <<'EOF'
import gc, sys
from pathlib import Path
from vitascope import train
from vitascope.records.record import evaluate_and_make_record, write_record_per_machine
kept, out, commit, first, recipe, seeds, views, *words = sys.argv[1:]
runs = []
for seed in range(int(first), int(first) + int(seeds)):
    runs.append(train(recipe, runs=kept, **dict(word.split("=", 1) for word in words), **{"train.seed": seed}))
    made = evaluate_and_make_record(runs, recipe, views=int(views), commit=commit or None)
    print("== seed", seed, made.test_accuracy[-1], made.seconds[-1], "s, cold", made.cold_seconds[-1], "s")
    write_record_per_machine(made, Path(out))
    gc.collect()  # a recorded step keeps its memory in a circle
EOF
}

kernels() {  # RECIPES: measured for the shipped table, which comes back with what it had
  cp src/vitascope/inference/kernel_choices.json "$OUT/kernel_choices.json"
  "$PYTHON" -m benchmarks.kernel_table --recipes ${RECIPES:-cifar10-94 cifar10-95 cifar10-96 cifar10-best cifar10} \
    --set ${MORE:-} --out "$OUT/kernel_choices.json"
}

sheet() {  # LETTER; what it needs to be written again at home comes back: runs.jsonl beside it
  mkdir -p "$KEPT/sheets" && cp -n docs/sheets/runs.jsonl "$KEPT/sheets" 2>/dev/null || true
  local -a weights=()
  local failed=0
  [ "$1" = D ] && weights=(--weights "$KEPT/data/deit_tiny_patch16_224.safetensors")
  "$PYTHON" -m vitascope sheet "$1" --out "$KEPT/sheets" "${weights[@]}" ${COMMIT:+--commit "$COMMIT"} ${QUICK:+--quick} \
    || failed=$?
  tar -czf "$OUT/sheets.tar.gz" -C "$KEPT/sheets" --exclude='*-full' --exclude='*-quick' .
  return $failed
}

mkdir -p "$OUT"
[ $# -gt 0 ] || { sed -n '2,5p' "$0"; exit 2; }
if [ "$1" = pack ]; then pack "${2:?where the data lies}"; exit; fi
for stage in "$@"; do
  echo "== $stage, $(date +%T)"
  "${stage%%:*}" $(tr ':' ' ' <<<"${stage#"${stage%%:*}"}")
done
