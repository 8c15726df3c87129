#!/bin/sh
# Writes the Python stubs of proto/ into clients/python; `make check-generated` compares them with what is committed.
set -eu
cd "$(dirname "$0")/.."
out=${1:-clients/python}
.venv/bin/python -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/kvasir/common/v1/*.proto proto/kvasir/cachestore/v1/*.proto proto/kvasir/inference/v1/*.proto
