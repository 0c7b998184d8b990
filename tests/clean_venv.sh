#!/usr/bin/env bash
# Exported folders in environments with torch, transformers and safetensors alone, of the oldest and the newest version of transformers that
# exports support. Needs a package index; the environments (1 GB each) are removed afterwards.
#   bash tests/clean_venv.sh FOLDER …        VERSIONS='4.48.0 5.24.0' chooses others; TORCH=torch==2.13.0 another torch
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: bash tests/clean_venv.sh EXPORTED_FOLDER …" >&2; exit 64; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for version in ${VERSIONS:-4.48.0 5.24.0}; do
    "${PYTHON:-python3}" -m venv "$place/$version"
    "$place/$version/bin/pip" install --quiet "${TORCH:-torch==2.13.0}" "transformers==$version" safetensors
    echo "== transformers $version"
    for folder in "$@"; do
        if [[ $version == 4.48* || $version == 4.49* || $version == 4.50* ]] && grep -q Qwen3ForCausalLM "$folder/config.json"; then
            echo "$folder: Qwen3 came with transformers 4.51"
            continue
        fi
        HF_HOME="$place/cache_$version" "$place/$version/bin/python" -W ignore "$here/clean_load.py" "$folder" 2>"$place/said" || {
            cat "$place/said" >&2
            exit 1
        }
    done
done
