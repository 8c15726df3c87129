#!/bin/sh
# join.sh STORE HOMES: give each home below HOMES copies of the credentials of the store's home, and nothing else of it.
set -eu
umask 077
owner=${KVASIR_USER:-10001}
for home in "$2"/*; do
  mkdir -p "$home/.kvasir/tokens"
  cp "$1/.kvasir/credentials.toml" "$home/.kvasir/credentials.toml"
  cp "$1"/.kvasir/tokens/*.token "$home/.kvasir/tokens/"
  chmod 0700 "$home" "$home/.kvasir" "$home/.kvasir/tokens"
  chown "$owner" "$home" "$home/.kvasir" "$home/.kvasir/tokens" "$home/.kvasir/credentials.toml" "$home"/.kvasir/tokens/*.token
done
