#!/usr/bin/env bash
# Installs Debian's chromium, with which the tests open the report of `dataservice simulate`.
#
# Needs root and apt-get. Where it cannot install it says so and ends well: those tests then skip,
# and say why.
set -euo pipefail

say() { printf 'browser: %s\n' "$*" >&2; }

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    say "$(command -v "$name") is here"
    exit 0
  fi
done
if ! command -v apt-get >/dev/null; then
  say "no chromium, and no apt-get to install it with; tests that need one will skip"
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  say "no chromium, and only root may install it: sudo apt-get install chromium; tests that need one will skip"
  exit 0
fi

install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium)
say "installing chromium (about 100 MB)"
if "${install[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null 2>&1 && "${install[@]}" >/dev/null 2>&1; }; then
  say "$(command -v chromium) is here"
else
  say "apt-get could not install chromium; tests that need one will skip"
fi
