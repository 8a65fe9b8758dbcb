#!/bin/sh
# Every CUDA kernel under memcheck, racecheck, synccheck and initcheck at once, then a line for each; exit code 1 if any
# complains or does not end. Needs a GPU, compute-sanitizer and an installed eyas-native with CUDA.
#   tests/native/cuda_sanitize.sh [FOLDER]        logs go to FOLDER (default: a temporary one); SECONDS_EACH limits a tool
here=$(cd "$(dirname "$0")" && pwd)
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
for tool in memcheck racecheck synccheck initcheck; do
  ( timeout "${SECONDS_EACH:-300}" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
      "${PYTHON:-python3}" "$here/cuda_sanitize.py" "$tool" >"$logs/$tool.log" 2>&1
    echo $? >"$logs/$tool.rc" ) &
done
wait
failed=0
for tool in memcheck racecheck synccheck initcheck; do
  rc=$(cat "$logs/$tool.rc")
  [ "$rc" = 0 ] || failed=1
  echo "$tool: exit $rc; $(grep -h 'agree with the CPU' "$logs/$tool.log" || echo 'the checks did not end'); $(grep -h \
    'SUMMARY' "$logs/$tool.log" | sed 's/^=* *//' | tr '\n' ' ')"
done
echo "logs: $logs"
exit $failed
