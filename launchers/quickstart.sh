#!/usr/bin/env bash
# From a machine with Python to a trained masked-diffusion language model, its samples and its export, and a model that was fine-tuned on word
# problems, with its score, in minutes on two cores:
#   bash launchers/quickstart.sh
# Every step that is done is recognised and skipped, so running this again is quick, also after an interruption.
set -euo pipefail
started=$SECONDS
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$REPOSITORY"
installed=$SECONDS

cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=$((cores < 8 ? cores : 8)) TOKENIZERS_PARALLELISM=false

plays=cache/plays
problems=cache/problems
run=runs/quickstart
base=runs/quickstart_problems
tuned=runs/sft/quickstart

step() {
    echo
    echo "== $1"
    shift
    "$@" || { local code=$?; echo "The quickstart stopped at: $*" >&2; exit "$code"; }
}

prepare() { "$PYTHON" launchers/prepare_data.py "$@"; }
torchrun() { "$VENV/bin/torchrun" --standalone --nproc-per-node=1 "$@"; }
pretrain() { torchrun launchers/pretrain.py +model=mdlm_tiny name=quickstart "$@"; }

# A text with problems in it needs a tokenizer with digits, and so a model of its own. An autoregressive one learns to copy numbers soonest.
pretrain_on_problems() {
    less $tuned/gsm8k/card.md                                             the score with everything that it depends on
  torchrun launchers/pretrain.py +model=ar_tiny name=quickstart_problems tokenizer=$problems/tokenizer.model \
        "data.train={plays: {path: $problems/plays}, problems: {path: $problems/text}}" "data.validation={problems: {path: $problems/held_out}}" \
        batch.length=128 batch.global_sequences=32 duration.steps=200 validation.every=0
}
finetune() {
    torchrun launchers/finetune.py +model=ar_tiny name=quickstart init_from=$base tokenizer=$problems/tokenizer.model sft=gsm_symbolic \
        sft.train=$problems/problems/train.jsonl sft.validation=$problems/problems/test.jsonl sft.format.context=96 sft.epochs=3 \
        schedule.peak=2e-3 validation.every=0
}
score() {
    "$PYTHON" launchers/evaluate.py task=gsm8k checkpoint=$tuned data=$problems/problems/test.jsonl train=$problems/problems/train.jsonl \
        output=$tuned/gsm8k temperature=0 batch=50
}

# What anybody does who is given the export: a process of its own, which has transformers and nothing of this project.
sample_export() {
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$PYTHON" -I - "$1" <<'EOF_PYTHON'
import sys

from transformers import AutoModel, AutoTokenizer, logging

logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
print(tokenizer.batch_decode(model.sample(count=1, seed=1).sequences)[0])
assert "pretrain" not in sys.modules, "the export needed the program that trained it"
EOF_PYTHON
}

step "Text: Shakespeare's plays, two of them held out" prepare plays output=$plays/text
step "Tokenizer of 256 pieces" prepare train_tokenizer input=$plays/text/train.jsonl output=$plays/tokenizer.model vocab_size=256 byte_fallback=false
for split in train validation; do
    step "Token files: $split" prepare tokenize input=$plays/text/$split.jsonl tokenizer=$plays/tokenizer.model output=$plays/$split
done

if "$PYTHON" launchers/summary.py --finished $run; then
    echo
    echo "== Pretraining: finished before (remove $run to train again)"
else
    if ! compgen -G "$run/checkpoints/step_*/COMPLETE" >/dev/null; then
        step "Pretraining, first half" pretrain duration.stop_after=200
    fi
    step "Pretraining, resumed from its checkpoint" pretrain
    rm -rf $run/samples.jsonl $run/hub
fi
if [[ ! -s $run/samples.jsonl ]]; then
    step "Three samples" "$PYTHON" launchers/sample.py checkpoint=$run count=3 output=$run/samples.jsonl
fi

if [[ ! -s $run/hub/gate.json ]]; then
    step "Export for transformers, compared with the network that was trained" "$PYTHON" launchers/convert.py hf checkpoint=$run output=$run/hub
fi
step "A sample of the export, by transformers alone" sample_export $run/hub

step "Word problems: templates of two steps, other instances of them held out" prepare gsm_symbolic output=$problems/problems count=4000 test_count=200 \
    text_count=2000 'templates=[26,43]'
step "Tokenizer of 1,024 pieces for plays and problems" prepare train_tokenizer "input=[$plays/text/train.jsonl,$problems/problems/text.jsonl]" \
    output=$problems/tokenizer.model vocab_size=1024 byte_fallback=false
for corpus in plays:$plays/text/train text:$problems/problems/text held_out:$plays/text/validation; do
    step "Token files: ${corpus%%:*}" prepare tokenize input=${corpus#*:}.jsonl tokenizer=$problems/tokenizer.model output=$problems/${corpus%%:*}
done
if ! "$PYTHON" launchers/summary.py --finished $tuned; then
    step "Pretraining on plays and problems" pretrain_on_problems
    step "Fine-tuning on problems" finetune
fi
step "Score on held-out problems" score

step "Summary" "$PYTHON" launchers/summary.py $run $plays/validation
"$PYTHON" launchers/summary.py $tuned
cat <<END

Took $((SECONDS - installed)) s after $((installed - started)) s of installation. What to type next (with $VENV/bin first on PATH):
  python launchers/sample.py checkpoint=$run count=3 prompt='O Romeo'   samples that begin with your words
  python launchers/convert.py checkpoint from=$run/hub output=runs/imported   the export as a checkpoint; init_from=runs/imported starts a run from it
  less $tuned/gsm8k/card.md                                             the score with everything that it depends on
  torchrun launchers/pretrain.py +model=ar_tiny                         the autoregressive baseline on the same text
  torchrun --nproc-per-node=2 launchers/pretrain.py +model=mdlm_tiny parallel.tensor=2 name=tensor2
  torchrun launchers/pretrain.py +model=mdlm_1p7b check=true            what a 1.7B run would need, without starting it
  torchrun launchers/pretrain.py --help                                 every preset; --cfg job lists every setting
END
