#!/usr/bin/env bash
# What is run on a GPU before a release, part by part; figures go to EXPERIMENTS.md.
#
#   tests/bench/gpu_round.sh PART...      tests token qwen together drafts deepseek memory cpu peers, ten minutes each on an
#                                         H200; what is timed wants the machine for itself
#
# PYTHON: the interpreter (python3).  OUT: where checkpoints of random bytes and results go (/tmp/nvmoe).
# TRANSFORMERS, LLAMA: interpreters of environments with the peers (PYTHON).
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-/tmp/nvmoe}
TRANSFORMERS=${TRANSFORMERS:-$PYTHON} LLAMA=${LLAMA:-$PYTHON}

# bench NAME SETTINGS...: one run under an 8 GB cap; prints the table's last row and the rates
bench() {
  local name=$1; shift
  echo "== $name: $*"
  "$PYTHON" run.py 'stages=[bench]' hw=h200 hw.vram_gib=8 paths.outputs="$OUT" bench.plot=false "$@" 2>&1 |
    grep -E '^[1-3] |^all|measured in|^prompt:|together|drafts|in turn|^peak|^VRAM|[Ee]rror|refuses' || true
}

tests() { # some compute on the CPU beside: threads of several processes that spin would keep the cores from one another
  export OMP_NUM_THREADS=2 GOMP_SPINCOUNT=1000
  "$PYTHON" -m pytest -q -p no:cacheprovider -n 6 -m 'not slow' tests/gpu --ignore tests/gpu/test_token_graph_gpu.py \
    -k 'not released_width'
  OMP_NUM_THREADS=8 "$PYTHON" -m pytest -q -p no:cacheprovider -n 2 -m gpu tests/gpu -k released_width
  "$PYTHON" -m pytest -q -p no:cacheprovider -n 8 tests/unit/test_deepseek_{linear,prompt,token,attention,index,compress}.py
}

token() { # alone: a graph that waits leaves other programs on the GPU only turns
  "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_token_graph_gpu.py
  "$PYTHON" tests/bench/bench_full_shape.py --experts 24 --tokens 40 --copy 0,4 --token --pin
}

qwen() {
  local model=(model=qwen_synthetic model.synthetic.experts=64 model.synthetic.skew=1 cache.vram_gib=0)
  local simulated=(cache.ram_gib=2 hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered)
  bench "drive at 8.2 GiB/s, 2 GiB of cache" "${model[@]}" "${simulated[@]}"
  bench "the same, reader threads" "${model[@]}" "${simulated[@]}" hw.drive.process=false
  bench "everything in RAM" "${model[@]}" prefetch.copy=4
  bench "the same, one graph a token" "${model[@]}" prefetch.copy=4 hw.graphs=token
}

together() {
  local model=(model=qwen_synthetic model.synthetic.experts=64 model.synthetic.skew=1 model.context_tokens=256)
  local simulated=(cache.ram_gib=2 hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered) count
  for count in 1 2 4 8; do
    bench "$count together" "${model[@]}" "${simulated[@]}" cache.vram_gib=0 bench.repeats=2 serve.max_batch=$count
    bench "$count together, all in RAM" "${model[@]}" cache.vram_gib=0 bench.repeats=2 serve.max_batch=$count
  done
}

drafts() { # each decodes the same tokens in turn without them
  local qwen=(model=qwen_synthetic model.synthetic.experts=64 model.synthetic.skew=1 cache.vram_gib=0)
  local simulated=(hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered) depth
  local guesses=(drafts.enabled=true drafts.gate=false bench.repeats=2 bench.acceptance=0.8)
  for depth in 1 4; do
    bench "Qwen, $depth guesses" "${qwen[@]}" "${simulated[@]}" "${guesses[@]}" cache.ram_gib=2 \
      model.context_tokens=2048 drafts.depth=$depth
  done
  bench "Qwen, all in RAM, 4 guesses" "${qwen[@]}" "${guesses[@]}" prefetch.copy=4 model.context_tokens=2048 drafts.depth=4
  bench "DeepSeek, two guesses" model=deepseek_synthetic model.synthetic.skew=1 model.synthetic.experts=16 \
    cache.vram_gib=0 prefetch.copy=0 cache.ram_gib=6.3 bench.tokens=16 "${simulated[@]}" "${guesses[@]}" drafts.depth=2
  PYTHONPATH=.:${PYTHONPATH:-} "$PYTHON" tests/bench/bench_mtp.py --device cuda
}

deepseek() {
  local model=(model=deepseek_synthetic model.synthetic.skew=1 cache.vram_gib=0 prefetch.copy=0 bench.tokens=16)
  local simulated=(model.synthetic.experts=16 hw.drive.simulate_gib_s=8.2 hw.drive.direct=buffered)
  bench "no cache, 311 tokens of prompt" "${model[@]}" "${simulated[@]}" cache.ram_gib=0 bench.prompt_length=311
  bench "half of the experts found" "${model[@]}" "${simulated[@]}" cache.ram_gib=6.3
  bench "this machine's drive" "${model[@]}" model.synthetic.experts=10 cache.ram_gib=0 bench.tokens=4 \
    bench.warmup_tokens=1 bench.repeats=2
}

cpu() {
  "$PYTHON" tests/bench/bench_cpu_experts.py --threads 1,4,8,13
  bench "experts shared with the CPU" model=qwen_synthetic model.synthetic.experts=64 cache.vram_gib=0 hw.cpu_experts=auto
  bench "head shared with the CPU" model=deepseek_synthetic model.synthetic.experts=16 prefetch.experts=0 \
    prefetch.copy=0 hw.drive.direct=buffered deepseek.head=auto
}

peers() { # where a memory cgroup may be made, --fill-ram does nothing
  local common=(--folder "$OUT/peers" --transformers-python "$TRANSFORMERS" --llama-python "$LLAMA" --device cuda
    --engines ours,transformers,llama.cpp --layers 10 --experts 64 --set vocab_size=16384 --cap-gib 3.5
    --overhead-gib 1.75 --vram-gib 2 --threads 4 --fill-ram)
  "$PYTHON" tests/bench/peers.py "${common[@]}" --only-compare
  "$PYTHON" tests/bench/peers.py "${common[@]}" --compared --tokens 4 --prompts 32,512 --record "$OUT/peers.csv"
  "$PYTHON" tests/bench/peers.py "${common[@]}" --compared --tokens 1 --prompts 2048 --record "$OUT/peers-2048.csv" \
    --llama n_batch=2048 n_ubatch=2048
}

memory() {
  "$PYTHON" tests/bench/bench_living_kv.py --out "$OUT"
}

[ $# -gt 0 ] || { sed -n '2,8p' "$0"; exit 2; }
for part in "$@"; do
  case $part in
    tests | token | qwen | together | drafts | deepseek | memory | cpu | peers) "$part" ;;
    *) echo "unknown part '$part': tests, token, qwen, together, drafts, deepseek, memory, cpu or peers" >&2; exit 2 ;;
  esac
done
