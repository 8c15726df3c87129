#!/bin/sh
# Two homes play two Macs: they are paired by a code, an agent moves, and goes on there without computing again.
#   sh move_between_homes.sh [DIRECTORY]
# It makes homes A and B in the directory, and ends what it started; without DIRECTORY it removes the homes, too.
set -eu
given=${1:-}
dir=${given:-$(mktemp -d)}
a() { kvasir --home "$dir/A" "$@"; }
b() { kvasir --home "$dir/B" "$@"; }
end() { a down >/dev/null || :; b down >/dev/null || :; [ -n "$given" ] || rm -rf "$dir"; }
trap end EXIT

a up -d --no-http >/dev/null
b up -d --no-http >/dev/null

# A shows a code and waits; B types it. Between two Macs: `--listen studio.local` instead of `--name studio`.
a pair --name studio --gives move --json >"$dir/pairing" &
until grep -q '"code"' "$dir/pairing" 2>/dev/null; do kill -0 $! && sleep 0.1 || exit 1; done
b pair "$(sed -n 's/.*"line": "\([^"]*\)".*/\1/p' "$dir/pairing")" --name laptop >/dev/null
wait $!

a chat ada --once "My name is Anna. My dog is called Rex."
b agents move ada --from studio
b chat ada --once "What is my dog called?"
a chat ada --once "What is my name?" || echo "and at A she is not any more (exit $?)"
