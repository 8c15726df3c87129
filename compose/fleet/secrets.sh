#!/bin/sh
# secrets.sh DIR: make the secrets of a fleet below DIR, once, each readable by the user of its program alone.
set -eu
umask 077
cd "$1"

secret() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }

# give FOLDER OWNER FILE: the text on the standard input becomes that file, if it is not there yet.
give() {
  [ ! -e "$1/$3" ] || return 0
  cat >"$1/$3.new"
  chmod 0400 "$1/$3.new"
  chown "$2" "$1/$3.new" "$1"
  mv "$1/$3.new" "$1/$3"
}

# The users of the images: Kvasir's 10001, versitygw's 10002, PostgreSQL's 999, Grafana's 472.
kvasir=${KVASIR_USER:-10001} s3=${S3_USER:-10002} postgres=${POSTGRES_USER_ID:-999} grafana=${GRAFANA_USER:-472}

[ -e postgres/password ] || secret | give postgres "$postgres" password
printf '127.0.0.1:5433:*:kvasir:%s\n' "$(cat postgres/password)" | give store "$kvasir" pgpass
[ -e s3/keys ] || printf 'ROOT_ACCESS_KEY=%s\nROOT_SECRET_KEY=%s\n' "$(secret | head -c 20)" "$(secret)" | give s3 "$s3" keys
. ./s3/keys
give store "$kvasir" bucket <<END
aws_access_key_id = $ROOT_ACCESS_KEY
aws_secret_access_key = $ROOT_SECRET_KEY
region = us-east-1
endpoint_url = http://127.0.0.1:7070
END
secret | give grafana "$grafana" password
