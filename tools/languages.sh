#!/usr/bin/env bash
# Builds the programs of examples/languages, in copies under .venv/languages, so that nothing is written beside them:
# `tools/languages.sh`, or `tools/languages.sh rust` for one. Does nothing for those that are current. Where the tools
# of a language keep what they download is the user's own; the versions are pinned beside the sources.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
built=$root/.venv/languages
languages=("$@")
[ $# -gt 0 ] || languages=(go java node rust)

# Where their installers put them, which is not always on PATH.
PATH=$PATH:/usr/local/go/bin:$HOME/.cargo/bin

declare -A PROGRAMS=(
    [go]="go"
    [java]="java javac mvn"
    [node]="node npm"
    [rust]="cargo cc"
)
missing=()
for language in "${languages[@]}"; do
    for program in ${PROGRAMS[$language]:?is no language of examples/languages}; do
        command -v "$program" >/dev/null || missing+=("$program (for $language)")
    done
done
if [ ${#missing[@]} -gt 0 ]; then
    printf 'languages: missing %s\n' "${missing[@]}" >&2
    echo "install Go 1.26, a JDK 17 with Maven 3.8, Node 20 with npm, Rust 1.88, or newer, or put them on PATH" >&2
    exit 1
fi

# The protoc that is pinned in .venv, for those whose tools bring none.
mkdir -p "$built"
export PROTOC=$built/protoc
printf '#!/bin/sh\nexec "%s/.venv/bin/python" -m grpc_tools.protoc "$@"\n' "$root" >"$PROTOC"
chmod +x "$PROTOC"

# rustup looks for its toolchains under HOME; in an environment with another HOME they still lie beside cargo.
cargo() {
    local beside
    beside=$(dirname "$(dirname "$(dirname "$(type -P cargo)")")")/.rustup
    # Not whether HOME has the directory: rustup makes one when it is asked and finds none.
    if ! command cargo --version >/dev/null 2>&1 && [ -d "$beside" ]; then
        RUSTUP_HOME=$beside command cargo "$@"
    else
        command cargo "$@"
    fi
}

build_go() {
    local package='Mratelimiter/v1/ratelimiter.proto=example.com/app/gen/ratelimiter/v1'
    # With the flags of tests/system/go, so that what both need is compiled once.
    local flags=(-mod=readonly -trimpath -buildvcs=false)
    mkdir gen
    go build "${flags[@]}" -o bin/ tool
    PATH=$PWD/bin:$PATH "$PROTOC" -I ../../../proto \
        --go_out=gen --go_opt=paths=source_relative,"$package" \
        --go-grpc_out=gen --go-grpc_opt=paths=source_relative,"$package" \
        ratelimiter/v1/ratelimiter.proto
    go build "${flags[@]}" -o first-check .
}

build_java() {
    # To a file first, since it writes escape sequences even if it has nothing to say.
    mvn --quiet --batch-mode package >build.log 2>&1 || { cat build.log >&2 && false; }
}

build_node() {
    npm install --loglevel=error --no-package-lock --ignore-scripts --no-audit --no-fund --no-update-notifier >/dev/null
}

# Its dependencies take most of the time, so what was built of them is kept.
build_rust() {
    CARGO_TARGET_DIR=$built/cargo cargo build --quiet
}

version_of() {
    case $1 in
        go) go version ;;
        java) javac -version ;;
        node) node --version ;;
        rust) cargo --version ;;
    esac
}

# What was built, and by which version of the tools.
stamp_of() {
    version_of "$1"
    (cd "$root" && find "examples/languages/$1" proto tools/languages.sh -type f -print0 | sort -z | xargs -0 sha256sum)
}

for language in "${languages[@]}"; do
    stamp=$(stamp_of "$language")
    copy=$built/$language
    [ "$stamp" != "$(cat "$copy/.stamp" 2>/dev/null)" ] || continue
    echo "languages: building $language"
    # As deep as the original, so that the contract is three levels up from both.
    rm -rf "$copy"
    cp -R "$root/examples/languages/$language" "$copy"
    (cd "$copy" && "build_$language")
    echo "$stamp" >"$copy/.stamp"
done
