#!/bin/sh
# Makes the secrets of compose.yaml, by chance, in the directory `secrets` beside this file or in the one that is named.
# Those that are there stay: nodes, servers and their volumes know them.
set -eu

directory=${1:-$(dirname "$0")/secrets}
# Compose mounts the files as they are, and nobody in the containers is their owner. So everybody may read the files, and
# on this machine nobody else may enter the directory.
umask 022
mkdir -p "$directory"
chmod 0700 "$directory"
cd "$directory"

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

# The text comes from stdin. A file is there whole or not at all.
write() {
    if [ -e "$1" ]; then
        cat >/dev/null
    else
        cat >"$1.new"
        mv "$1.new" "$1"
    fi
}

random | write admin_token
random | write grafana_password
random | write postgres_password
printf 'postgresql://ratelimitd:%s@postgres/ratelimitd' "$(cat postgres_password)" | write database_url
printf 'redis://ratelimitd:%s@valkey:6379' "$(random)" | write redis_url

password=$(sed 's/.*ratelimitd:\(.*\)@.*/\1/' redis_url)
# Nodes need no more than this (docs/cluster.md). Whoever has no password may ask whether the server is there.
write valkey_users <<END
user default on nopass resetkeys resetchannels -@all +ping
user ratelimitd on >$password resetkeys ~rl1:* resetchannels &rl1:* -@all +evalsha +script|load +mget +get +getrange +set +zadd +zrem +zrange +zremrangebyscore +expire +time +publish +subscribe +ping +role +client|setname
END
