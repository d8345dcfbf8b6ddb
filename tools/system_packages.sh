#!/usr/bin/env bash
# Installs the requirements of the end-to-end tests: builds the Go programs, pinned and verified by
# tests/system/go/go.sum, and the examples in other languages; unpacks or installs Debian packages if permitted, else
# reports what is missing and fails. A test that needs a package adds it to a list, with its reason.
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

"$root/tools/languages.sh"

# Only unpacked, into .venv, which takes no root: installed, each server would start with the machine. Each with a file
# that it brings. Libraries that a base system lacks are on the list, too: programs find them by LD_LIBRARY_PATH.
library=usr/lib/$(gcc -print-multiarch)
UNPACKED=(
    prometheus=usr/bin/prometheus # the alerts and the dashboard, by promtool and by a real server
    nginx=usr/sbin/nginx # a node behind a plain proxy
    haproxy=usr/sbin/haproxy # the same, by TCP and by HTTP
    caddy=usr/bin/caddy # a proxy that asks a node before it passes a request on
    "liblua5.3-0=$library/liblua5.3.so.0" # of haproxy, and the next two
    "libopentracing-c-wrapper0=$library/libopentracing-c-wrapper.so.0"
    "libopentracing1=$library/libopentracing.so.1"
)

unpacked=$root/.venv/debian
for entry in "${UNPACKED[@]}"; do
    package=${entry%%=*} file=${entry#*=}
    [ ! -e "$unpacked/$file" ] || continue
    if ! command -v apt-get >/dev/null; then
        echo "system packages: missing $package; without apt-get, put it into $unpacked/$file" >&2
        exit 1
    fi
    echo "system packages: unpacking $package"
    if [ "$(id -u)" -eq 0 ]; then
        apt-get update --quiet=2
    fi
    download=$(mktemp -d)
    # apt verifies the signature. As root it would remark on stderr that its own user may not enter the directory.
    (cd "$download" && apt-get download --quiet=2 --option APT::Sandbox::User=root "$package")
    dpkg-deb --extract "$download"/*.deb "$unpacked"
    rm -r "$download"
done

PACKAGES=(
    chromium # the browser that the tests of the pages drive; Playwright's own would be a download
    systemd # systemd-analyze: is the unit one, and what may it do
    curl # the command lines of the pages are run as they are
    buildah # builds the image, and podman runs it with runc; none needs an engine
    podman
    runc # podman's default, crun, refuses machines with both kinds of cgroups
    mmdebstrap # stands in for the base image
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
