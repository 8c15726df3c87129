#!/bin/sh
# curl alone: an agent is told something, and asked about it; the headers say what was remembered.
#   kvasir up -d; sh curl_chat.sh
set -eu
url=$(sed 's/.*"http_url": "\([^"]*\)".*/\1/' ~/.kvasir/run/up.json) # http://127.0.0.1:8642/v1

ask() {
  curl -sS --fail-with-body -D /dev/stderr "$url/chat/completions" \
    -H "Authorization: Bearer $(cat ~/.kvasir/tokens/client.token)" -H "Content-Type: application/json" \
    -H "x-agent-id: examples/curl" -H "x-agent-memory: append" \
    -d "{\"model\": \"kvasir-tiny\", \"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}"
  echo
}

ask "My cat is called Luna."
ask "What is my cat called?"
