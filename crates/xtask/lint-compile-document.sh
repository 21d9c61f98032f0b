#!/usr/bin/env bash
# Cargo calls this instead of rustc for the crates of this workspace (RUSTC_WORKSPACE_WRAPPER), so that one
# build checks lints, makes the programs, and checks the documentation. clippy-driver is rustc with lints, and
# `rustdoc --check` reads the same arguments. Separate runs of `cargo clippy` and `cargo doc` would compile
# every dependency a second time. What the tools print is shown by cargo, from its cache in later builds, too.
set -euo pipefail
tools=${1%/*}
[ "$tools" != "$1" ] || tools=$(rustc --print sysroot)/bin
"$tools/clippy-driver" "$@"

shift
arguments=()
compiles=
# As `cargo doc` does: all of a program is private.
private=()
while [ $# -gt 0 ]; do
    case $1 in
        --test) exit ;; # its documentation is that of the crate without tests
        --emit=*) compiles=1 ;;
        bin) private=(-A rustdoc::private-intra-doc-links) arguments+=("$1") ;;
        incremental=*) unset 'arguments[-1]' ;; # its -C
        --out-dir) shift ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
[ -n "$compiles" ] || exit 0 # a question about the compiler
# `--check` is not stable yet: the links are checked, and no pages are made.
RUSTC_BOOTSTRAP=1 "$tools/rustdoc" "${arguments[@]}" "${private[@]}" --document-private-items \
    -Z unstable-options --check
