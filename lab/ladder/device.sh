#!/bin/sh
# All arms side by side on one GPU: sh lab/ladder/device.sh SECONDS TOKENS KEPT OUT [options of ladder.py]
# An arm has a process of its own, since each is compiled by itself; MPS lets their kernels run at the same time.
limit=$1 tokens=$2 kept=$3 out=$4
shift 4
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4 TORCHINDUCTOR_CACHE_DIR="$kept/compiled"
export CUDA_MPS_PIPE_DIRECTORY=/tmp/ladder-mps CUDA_MPS_LOG_DIRECTORY=/tmp/ladder-mps-log
mkdir -p "$kept" "$out" $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY
if [ -z "$WITHOUT_MPS" ]; then
    nvidia-cuda-mps-control -d && echo "MPS runs"
else
    unset CUDA_MPS_PIPE_DIRECTORY
fi
for arm in ${ARMS:-softmax head_norm all_heads_norm scale head_gate}; do
    python3 "$(dirname "$0")/ladder.py" --arm $arm --tokens "$tokens" --kept "$kept" --out "$out" --limit-s $limit "$@" &
    running="$running $!"
done
wait $running
[ -z "$WITHOUT_MPS" ] && echo quit | nvidia-cuda-mps-control
