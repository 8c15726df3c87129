#!/bin/sh
# curl: a turn, a stream, and an agent by its name.
set -eu
ask() { curl -sS --fail-with-body -H "Authorization: Bearer $KVASIR_KEY" -H 'content-type: application/json' "$@"; }
if [ $# -gt 0 ]; then
  ask "$KVASIR_URL/v1/agents/curl/generate" \
    -d '{"append_messages": [{"role": "user", "content": "And now?"}]}' | grep -q CACHE_SOURCE_WARM
  echo "curl: after kill -9, warm"
  exit
fi
ask "$KVASIR_URL/v1/chat/completions" -H 'x-agent-id: curl' \
  -d '{"model": "'"$KVASIR_MODEL"'", "messages": [{"role": "user", "content": "My name is Anna."}]}' | grep -q '"finish_reason":"stop"'
ask "$KVASIR_URL/v1/agents/curl/generate" \
  -d '{"append_messages": [{"role": "user", "content": "What is my name?"}]}' | grep -q Anna
ask -N "$KVASIR_URL/v1/messages" \
  -d '{"model": "'"$KVASIR_MODEL"'", "max_tokens": 8, "stream": true, "messages": [{"role": "user", "content": "Hello."}]}' | grep -q message_stop
echo "curl: a turn, an agent by its name, a stream"
