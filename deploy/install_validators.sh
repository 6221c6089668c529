#!/usr/bin/env bash
# Installs what checks the files in deploy/ and does not come from Python's index: shellcheck for the
# scripts, promtool (Debian's prometheus) for rules and metrics. Needs apt and root; where it cannot
# install it says so and ends well: the tests that need them then skip, and say why.
set -euo pipefail

say() { printf 'validators: %s\n' "$*" >&2; }

missing=()
command -v shellcheck >/dev/null || missing+=(shellcheck)
command -v promtool >/dev/null || missing+=(prometheus)
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  say "no apt-get as root here: put ${missing[*]} on PATH, or the tests that need them skip"
  exit 0
fi

install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}")
say "installing ${missing[*]}"
if "${install[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null 2>&1 && "${install[@]}" >/dev/null 2>&1; }; then
  say "${missing[*]}: here"
else
  say "apt-get could not install ${missing[*]}; the tests that need them skip"
fi
