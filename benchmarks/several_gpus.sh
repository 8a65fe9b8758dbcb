#!/usr/bin/env bash
# Extraction, training and serving on 1, 2, 4, 8 GPUs of this host (as many as there are), into one JSON.
#
#   several_gpus.sh --target MODEL [--draft DRAFT] [--prompts P.jsonl] [--parts capture,killed,train,serve] [--out FILE]
#                   [--work FOLDER] [--limit SECONDS] [--cpu]
#
# MODEL is a small Llama with a tokenizer and chat template (SmolLM2-135M), DRAFT its draft; everything else is made
# here. Each part has --limit seconds (from the number of GPUs where not given), is ended after them, and leaves what it
# had found; the others still run. --cpu needs no GPU: gloo, SGLang's CPU way with 2 ranks, a tiny target where none is
# given. The engines' logs are kept in FILE-logs/. PYTHON names the interpreter, EYAS_ENGINE_PYTHON the one with sglang.
# Exit code 0: every part ended and no check failed.
set -u -o pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
parts=capture,killed,train,serve out=several_gpus.json limit=
work=${TMPDIR:-/tmp}
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --parts) parts=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --work) work=$2; shift 2 ;;
    --limit) limit=$2; shift 2 ;;
    --cpu) arguments+=(--cpu); shift ;;
    --target | --draft | --prompts) arguments+=("$1" "$2"); shift 2 ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
done
for part in ${parts//,/ }; do
  case $part in capture | killed | train | serve) ;; *) echo "no part '$part': capture, killed, train, serve" >&2; exit 2 ;; esac
done

# NVLink multicast needs a fabric manager that rented and virtual machines often lack; where it is known to work, set 1.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$work" "$(dirname "$out")" && work=$(mktemp -d "$work/eyas-several.XXXXXX") || exit 2
running=
trap '[ -z "$running" ] || { kill "$running"; wait "$running"; }; rm -rf "$work"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
arguments+=(--out "$out" --work "$work")
limits=$("$python" "$here/several_report.py" begin --parts "$parts" "${arguments[@]}") || exit 2
while read -r part usual; do
  begun=$SECONDS
  # TERM first, so that a part ends its servers; 124 is timeout's word for having had to.
  timeout --kill-after=20 "${limit:-$usual}" "$python" "$here/several_$part.py" "${arguments[@]}" < /dev/null &
  running=$!
  wait "$running"
  code=$? running=
  "$python" "$here/several_report.py" end --part "$part" --code $code --seconds $((SECONDS - begun)) "${arguments[@]}"
  find "$work/$part" -name server.log | while read -r log; do  # the work folder goes, the engines' logs stay
    name=${log#"$work/"}
    mkdir -p "${out%.json}-logs" && cp "$log" "${out%.json}-logs/${name//\//_}"
  done
done <<< "$limits"
"$python" "$here/several_report.py" summary "${arguments[@]}"
