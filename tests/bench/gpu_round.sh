#!/usr/bin/env bash
# What is run on a GPU before a release, part by part; figures go to EXPERIMENTS.md.
#
#   tests/bench/gpu_round.sh PART...      tests token qwen together deepseek memory cpu, about ten minutes each on an H200
#
# PYTHON: the interpreter (python3).  OUT: where checkpoints of random bytes and results go (/tmp/nvmoe).
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-/tmp/nvmoe}

# bench NAME SETTINGS...: one run under an 8 GB cap; prints the table's last row and the rates
bench() {
  local name=$1; shift
  echo "== $name: $*"
  "$PYTHON" run.py 'stages=[bench]' hw=h200 hw.vram_gib=8 paths.outputs="$OUT" bench.plot=false "$@" 2>&1 |
    grep -E '^[1-3] |^all|measured in|^prompt:|decoded together|^peak|^VRAM|[Ee]rror|refuses' || true
}

tests() {
  "$PYTHON" -m pytest -q -p no:cacheprovider -n 4 -m 'not slow' tests/gpu --ignore tests/gpu/test_token_graph_gpu.py
  "$PYTHON" -m pytest -q -p no:cacheprovider -n 8 tests/unit/test_deepseek_{linear,prompt,token,attention,index,compress}.py
}

token() { # alone: a graph that waits leaves other programs on the GPU only turns
  "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_token_graph_gpu.py
  "$PYTHON" tests/bench/bench_full_shape.py --experts 64 --tokens 60 --copy 0,4 --token --pin
}

qwen() {
  local model=(model=qwen_synthetic model.synthetic.experts=64)
  bench "drive at 8.2 GiB/s, 2 GiB of cache" "${model[@]}" cache.vram_gib=0 cache.ram_gib=2 \
    hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered
  bench "the same, a process reads" "${model[@]}" cache.vram_gib=0 cache.ram_gib=2 \
    hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered hw.drive.process=true
  bench "everything in RAM" "${model[@]}" cache.vram_gib=0 prefetch.copy=4
}

together() {
  local model=(model=qwen_synthetic model.synthetic.experts=64) count
  for count in 1 2 4 8; do
    bench "$count together" "${model[@]}" cache.vram_gib=0 cache.ram_gib=2 model.context_tokens=2048 \
      hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered bench.repeats=2 serve.max_batch=$count
  done
}

deepseek() {
  local model=(model=deepseek_synthetic cache.vram_gib=0 prefetch.copy=0)
  local simulated=(model.synthetic.experts=16 hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered)
  bench "no cache, 311 tokens of prompt" "${model[@]}" "${simulated[@]}" cache.ram_gib=0 bench.prompt_length=311
  bench "half of the experts found" "${model[@]}" "${simulated[@]}" cache.ram_gib=6.3
  bench "this machine's drive" "${model[@]}" model.synthetic.layers=8 model.synthetic.experts=12 cache.ram_gib=0
}

cpu() {
  "$PYTHON" tests/bench/bench_cpu_experts.py --threads 1,4,8,13
  bench "experts shared with the CPU" model=qwen_synthetic model.synthetic.experts=64 cache.vram_gib=0 hw.cpu_experts=auto
  bench "head shared with the CPU" model=deepseek_synthetic model.synthetic.experts=16 prefetch.experts=0 \
    prefetch.copy=0 hw.drive.direct=buffered deepseek.head=auto
}

memory() {
  "$PYTHON" tests/bench/bench_living_kv.py --out "$OUT"
}

[ $# -gt 0 ] || { sed -n '2,6p' "$0"; exit 2; }
for part in "$@"; do
  case $part in
    tests | token | qwen | together | deepseek | memory | cpu) "$part" ;;
    *) echo "unknown part '$part': tests, token, qwen, together, deepseek, memory or cpu" >&2; exit 2 ;;
  esac
done
