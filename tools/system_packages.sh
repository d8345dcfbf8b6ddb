#!/usr/bin/env bash
# Makes sure that what the end-to-end tests need is there: builds the Go programs, pinned and verified by
# tests/system/go/go.sum, and installs Debian packages where it may; else says what is missing and fails. A test that
# needs a package adds it to the list, with its reason.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
go=$(command -v go || echo /usr/local/go/bin/go)
if [ ! -x "$go" ]; then
    echo "system packages: missing Go, for h2spec and the grpc-go client: install it, or put it on PATH" >&2
    exit 1
fi
# Does nothing when they are current. The Go caches are the user's own.
"$go" build -C "$root/tests/system/go" -mod=readonly -trimpath -buildvcs=false -o "$root/.venv/go/" \
    ./client github.com/summerwind/h2spec/cmd/h2spec

PACKAGES=(
    redis-server # of Debian 12 it is 7.0, the oldest shared state that is promised; Valkey comes as a wheel
)

missing=()
for package in "${PACKAGES[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "system packages: installing ${missing[*]}"
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "${missing[@]}"
else
    echo "system packages: missing ${missing[*]}" >&2
    echo "install them with: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
