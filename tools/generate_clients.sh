#!/bin/sh
# Copies the contract into the clients that are built from it, and writes Go's stubs into clients/go/gen.
# The plugins' versions are pinned here; `go install` brings them.
set -eu
cd "$(dirname "$0")/.."
# Copies and no links: a client's folder is built wherever it lies. test_client_stubs.py compares them with proto/.
for client in go typescript rust java; do
  rm -rf "clients/$client/proto/kvasir" "clients/$client/proto/vectors"
  mkdir -p "clients/$client/proto"
  cp -R proto/vectors "clients/$client/proto"
  test $client = go || cp -R proto/kvasir "clients/$client/proto"
done
out=${1:-clients/go/gen}
bin=$PWD/out/protoc-go
command -v go >/dev/null || { echo "no Go here: $out stays as it is" >&2; exit 0; }
test -x "$bin/protoc-gen-go" || GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
test -x "$bin/protoc-gen-go-grpc" || GOBIN=$bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
mkdir -p "$out"
PATH=$bin:$PATH .venv/bin/python -m grpc_tools.protoc -I proto --go_out="$out" --go_opt=paths=source_relative \
  --go-grpc_out="$out" --go-grpc_opt=paths=source_relative $(find proto/kvasir -name '*.proto' | sort)
# What they were made of: tests/kvasir/clients/test_client_stubs.py compares it with proto/, without Go.
(cd proto && find kvasir -name '*.proto' | sort | xargs ../.venv/bin/python -c '
import hashlib, pathlib, sys
for name in sys.argv[1:]:
    print(hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest(), name)') > "$out/proto.sha256"
